"""The page about other languages is right: each call of grpcurl is made, by reflection, as
grpcurl makes it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-clients.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
LINES = [
    line.replace("\\\n", " ")
    for block in BLOCKS
    for line in re.split(r"^\$ ", block, flags=re.MULTILINE)
    if line.startswith("grpcurl ")
]


def grpcurl(line: str, addresses: dict[str, str]) -> list[dict[str, Any]]:
    """Return the output of the command, one object for each message."""
    words = shlex.split(line)[1:]
    assert words.pop(0) == "-plaintext"
    body = "{}"
    if words[0] == "-d":
        body = words[1]
        words = words[2:]
    address, *rest = words
    with grpc.insecure_channel(addresses[address]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        if rest == ["list"]:
            return [{"services": list(database.get_services())}]
        if rest[0] == "describe":
            return [{"fields": [field.name for field in pool.FindMessageTypeByName(rest[1]).fields]}]
        service, _, name = rest[0].partition("/")
        method = pool.FindServiceByName(service).FindMethodByName(name)
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        reply = call(json_format.Parse(body, GetMessageClass(method.input_type)()), timeout=60)
        replies = list(reply) if method.server_streaming else [reply]
        return [json.loads(json_format.MessageToJson(one, descriptor_pool=pool)) for one in replies]


def test_the_page_shows_every_kind_of_call() -> None:
    assert len(LINES) >= 7


def test_the_command_that_makes_stubs_finds_the_file_and_tells_its_plugins_the_import_path(
    tmp_path: Path,
) -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\$ (protoc .*)$", page, re.MULTILINE)
    _, folder, *options, file = shlex.split(line)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            folder,
            f"--descriptor_set_out={tmp_path / 'found'}",
            file,
        ],
        cwd=PAGE.parents[2],
        check=False,
    )

    assert done.returncode == 0
    # The files have no go_package, without which the plugins know no import path.
    for plugin in ("--go_opt", "--go-grpc_opt"):
        assert f"{plugin}=M{file}=example.com/mine/lapssd" in options


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_is_answered(fake_stack: LocalStack, line: str) -> None:
    if '"s0.…"' in line:
        with Client(fake_stack.gateway_address) as client:
            line = line.replace("s0.…", client.generate("Once", max_tokens=3).accepted.request_id)
    addresses = {
        "127.0.0.1:50051": fake_stack.gateway_address,
        "127.0.0.1:50052": fake_stack.scheduler_address,
    }

    told = grpcurl(line, addresses)

    assert told
    assert all(told)
