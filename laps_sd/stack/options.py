"""The components of a stack, and the checks that need no process."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from laps_sd.errors import StartupError
from laps_sd.service.config import FALSE, PREFIX
from laps_sd.service.hub import local_model
from laps_sd.service.tokenizer_match import check_tokenizers
from laps_sd.service.wire import Tls

REDIS_PORT = 6379
"""Port of a URL without one."""
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Components of a stack and their settings. A setting of None: the service's own default."""

    shards: int = 1
    """Number of shards, each with its own schedulers and workers."""
    workers: int = 1
    """Number of workers of each shard."""
    schedulers: int = 1
    """Number of schedulers of each shard: one leads, the others are standbys."""
    gateways: int = 1
    engine: Literal["auto", "demo", "fake", "vllm"] = "auto"
    """auto and vllm: the target if one is given, else the demo pair."""
    worker_python: Path | None = None
    """Python interpreter of the workers, whose environment has laps-sd and the engine; None: this one."""
    policy: str | None = None
    shard: str = "s0"
    """Name of the first shard; further ones are s1, s2 …"""
    pool: str = "demo"
    model: str = "laps-sd-demo"
    target: Path | None = None
    """Model directories; None: the shipped demo pair."""
    draft: Path | None = None
    context_tokens: int | None = None
    """Most tokens of prompt and output of one request, in gateway and workers alike.

    None: the limit of the model, at most 8192.
    """
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    slots: int | None = None
    redis_url: str | None = None
    """URL of the record; None: an embedded Valkey."""
    data_dir: Path | None = None
    """Directory of the embedded Valkey's record; None: in the temporary folder, deleted with the stack."""
    threads: int = 1
    """CPU threads of each worker. More than there are cores, of all workers together, slow the workers down."""
    drain_s: float = 0.8
    """Longest time that a component drains.

    `stop` kills components that take much longer (STOP_S), `terminate` waits.
    """
    log_level: str = "info"
    keep_logs: bool = False
    """Whether the logs stay in the stack's folder after its end; nothing else does."""
    tls: Tls | None = None
    """Mutual TLS on every gRPC link, with these files at both ends."""
    link_tls: Mapping[str, Tls] = dataclasses.field(default_factory=dict)
    """Files that a "gateway" or a "worker" presents to schedulers instead."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further variables for all services (LAPS_SD_…); the stack's own take precedence."""


def with_local_models(options: StackOptions) -> StackOptions:
    """Return the options with directories in place of names on the Hugging Face hub. Raises StartupError.

    Models that are not on this machine are downloaded, unless `check_models` refuses the options in any case.
    """
    if options.target is None or options.engine not in ("auto", "vllm"):
        return options
    draft = None if options.draft is None else local_model(options.draft)
    return dataclasses.replace(options, target=local_model(options.target), draft=draft)


def check_models(options: StackOptions) -> None:
    """Raise StartupError if the model directories are not ones, or do not go together.

    It compares the tokenizers of target and draft too: after loading, a mistake would be seen minutes later.
    """
    if options.target is not None and options.engine not in ("auto", "vllm"):
        raise StartupError(
            f"--engine {options.engine} brings its own model: leave out --engine or the target."
        )
    if options.draft is not None and options.target is None:
        raise StartupError(
            "--draft needs a target, the model that it drafts for: laps-sd up TARGET --draft DRAFT."
        )
    python = options.worker_python
    if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
        raise StartupError(
            f"--worker-python {python} is not a program that can be run: name the interpreter, as VENV/bin/python."
        )
    for name in (f"{PREFIX}TLS_CERT", f"{PREFIX}LINK_TLS"):
        if options.tls is None and options.environment.get(name, "").lower() not in ("", *FALSE):
            raise StartupError(
                f"{name} is set, and `laps-sd up` uses no TLS: unset it, or start the services one by one."
            )
    if options.engine == "vllm" and '"model"' in options.environment.get(f"{PREFIX}VLLM_ARGS", ""):
        raise StartupError(
            f"{PREFIX}VLLM_ARGS names a model: name it as `laps-sd up MODEL`, so that the gateway has its tokenizer."
        )
    for flag, path in (("--target", options.target), ("--draft", options.draft)):
        if path is None:
            continue
        needed = path / "config.json"
        if not needed.is_file():
            raise StartupError(
                f"{flag} {path} is not a model directory: {needed} does not exist."
                if path.is_dir()
                else f"{flag} {path} does not exist; give the directory of a model (config.json, safetensors), or its "
                "name on the Hugging Face hub (org/name)."
            )
    if options.target is not None and options.draft is not None:
        try:
            check_tokenizers(options.target, options.draft)
        except ValueError as error:
            raise StartupError(f"--draft {options.draft} does not fit: {error}.") from error


def check_record(options: StackOptions) -> None:
    """Raise StartupError if the record cannot be reached.

    Otherwise the start would wait for it until its timeout.
    """
    url = urlsplit(options.redis_url or "")
    if url.scheme not in ("redis", "rediss"):
        return  # embedded, a socket file, or something that the scheduler refuses
    try:
        host, port = url.hostname or "localhost", url.port or REDIS_PORT
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except ValueError:
        return
    except OSError as error:
        raise StartupError(
            f"no Redis answers at {host}:{port} ({error.strerror or error}): start one, name another with "
            "--redis-url, or leave that out for an embedded one."
        ) from None
