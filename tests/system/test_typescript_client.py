"""The TypeScript client against real gateways: its own tests run in node; `make client-typescript` builds it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from laps_sd.service.keys import digest_of, new_key
from laps_sd.service.wire import Tls
from laps_sd.stack.local import LocalStack
from tests.certificates import write_certificates
from tests.conftest import StackMaker

PACKAGE = Path(__file__).parents[2] / "clients" / "typescript"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Skip the tests where there is no node, or no build of the present sources."""
    reason = ""
    if shutil.which("node") is None:
        reason = "node is not installed"
    elif not is_built():
        reason = "the client is not built: make client-typescript"
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def is_built() -> bool:
    result = PACKAGE / "dist" / "src" / "index.js"
    sources = [path for folder in ("src", "test", "examples") for path in (PACKAGE / folder).rglob("*.ts")]
    return result.is_file() and result.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def node(*arguments: str | Path, cwd: Path = PACKAGE, **environment: str) -> str:
    """Run node and return its output. Fail with the output if it fails."""
    done = subprocess.run(
        ["node", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def run_tests(name: str, stack: LocalStack | None = None, **environment: str) -> None:
    """Run one file of node's tests against the gateways of a stack."""
    gateways = ",".join(stack.gateway_addresses) if stack else ""
    output = node("--test", f"dist/test/{name}.test.js", LAPS_SD_TEST_GATEWAYS=gateways, **environment)
    assert re.search(r"^\W*pass [1-9]", output, re.MULTILINE), output


def test_calls_are_repeated_and_streams_go_on_by_the_rules_of_the_python_client() -> None:
    run_tests("repair")


def test_each_call_works(fake_stack: LocalStack) -> None:
    run_tests("calls", fake_stack)


def test_streams_go_on_at_another_gateway_when_theirs_is_killed(make_stack: StackMaker) -> None:
    stack = make_stack(workers=2, gateways=2)
    run_tests("lost", stack, LAPS_SD_TEST_PID=str(stack.children["gateway-0"].pid))


def test_tls_and_api_keys_are_used(make_stack: StackMaker, tmp_path: Path) -> None:
    folder = write_certificates(tmp_path / "tls")
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.typescript]\nkeys = ["{digest_of(key)}"]\n')
    tls = Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")
    stack = make_stack(tls=tls, environment={"LAPS_SD_API_KEYS_FILE": str(keys)})

    run_tests("secure", stack, LAPS_SD_TEST_TLS=str(folder), LAPS_SD_TEST_KEY=key)


def test_the_example_prints_a_stream(fake_stack: LocalStack) -> None:
    printed = node(
        "dist/examples/stream.js", fake_stack.gateway_address, "Once upon a time", "--max-tokens", "12"
    )

    assert re.search(r"(?s).\n-- (LENGTH|STOP), \d+ tokens, \d+ of \d+ draft tokens accepted\n$", printed), (
        printed
    )


def test_the_blocks_of_its_page_run(fake_stack: LocalStack, tmp_path: Path) -> None:
    """In another package, which has this one installed."""
    blocks = re.findall(r"```ts\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "laps-sd").symlink_to(PACKAGE, target_is_directory=True)
    program = "\n".join(blocks).replace("127.0.0.1:50051", fake_stack.gateway_address)
    (tmp_path / "page.mjs").write_text(program, encoding="utf-8")

    printed = node("page.mjs", cwd=tmp_path)

    assert "sampling.top_p must be above 0 and at most 1, got 2\n" in printed
    assert re.search(r"\n\d+ Once upon a time \d+\n$", printed), printed
