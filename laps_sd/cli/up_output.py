"""Terminal output of `laps-sd up`: the progress of the start, where the system listens, and what to try."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.status import Status

from laps_sd.stack.local import LocalStack, Progress

__all__ = ["line_printer", "own_command", "print_logs", "print_plain", "print_usage", "progress_reporter"]

ORDER = ("gateway", "scheduler", "worker", "valkey")
"""Order of the components in the list: what a client needs comes first."""


def print_plain(console: Console, text: str) -> None:
    """Print a text as it is: without markup, and in lines that the terminal breaks."""
    console.print(text, markup=False, soft_wrap=True)


def own_command() -> str:
    """Return how the user can call this program from the current directory."""
    script = Path(sys.executable).parent / "laps-sd"
    found = shutil.which("laps-sd")
    if found is not None and Path(found).parent.resolve() == script.parent.resolve():
        return "laps-sd"
    program = script if script.is_file() else Path(sys.executable)
    with contextlib.suppress(ValueError, OSError):
        program = program.relative_to(Path.cwd())
    # A name without a slash would be looked for in PATH.
    text = str(program) if program.is_absolute() or len(program.parts) > 1 else f"./{program}"
    return shlex.quote(text) + ("" if script.is_file() else " -m laps_sd")


def progress_reporter(console: Console, status: Status) -> Progress:
    """Return a callback that prints each component that is ready, and has the status show the others."""
    waiting: list[str] = []

    def report(name: str, state: str, seconds: float) -> None:
        if state == "starting":
            waiting.append(name)
        elif state == "ready":
            waiting.remove(name)
            console.print(f"  [green]ready[/green]  {name:<12} {seconds:5.1f} s")
        status.update("waiting for " + ", ".join(waiting) if waiting else "ready")

    return report


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line after the time of day."""

    def print_line(sentence: str) -> None:
        print_plain(console, f"{time.strftime('%H:%M:%S')}  {sentence}")

    return print_line


def _endpoints(stack: LocalStack, name: str) -> str:
    """Return the addresses and the role of a component."""
    kind = name.split("-")[0]
    if kind == "valkey":
        return stack.redis_url
    parts = []
    if kind in ("gateway", "scheduler"):
        parts.append(f"gRPC {stack.address(name)}")
    if kind == "gateway":
        parts.append(f"HTTP (OpenAI) {stack.http_url_of(name)}")
    parts.append(f"metrics {stack.metrics_url(name)}")
    if kind == "scheduler" and stack.options.schedulers > 1:
        parts.append("leads" if stack.leads(name) else "stands by")
    if kind in ("scheduler", "worker") and stack.options.shards > 1:
        parts.append(f"shard {stack.shard_of(name)}")
    return ", ".join(parts)


def print_usage(console: Console, stack: LocalStack, *, alone: bool) -> None:
    """Print where the system listens and what to try; `alone`: the commands find it without its addresses."""
    console.print("\nListening:")
    for name in sorted(stack.children, key=lambda name: ORDER.index(name.split("-")[0])):
        print_plain(console, f"  {name:<12} process {stack.children[name].pid:<7}  {_endpoints(stack, name)}")
    gateway = stack.gateway_address
    elsewhere = "" if alone else f" --url {gateway}"
    command = own_command()
    console.print("A process that is killed is started again on the same ports: try kill -9 NUMBER.")
    console.print("Try in another terminal:")
    print_plain(console, f'  {command} generate "What is the capital of France?"{elsewhere}')
    print_plain(
        console,
        f'  grpcurl -plaintext -d \'{{"text": "Once"}}\' {gateway} laps_sd.v1.Inference/GenerateStream',
    )
    body = f'{{"model": "{stack.options.model}", "prompt": "Once", "stream": true}}'
    print_plain(
        console, f"  curl -N {stack.http_url}/completions -H 'Content-Type: application/json' -d '{body}'"
    )
    print_plain(console, f"  {command} explain REQUEST_ID{elsewhere}")
    seeds = ",".join(stack.address(name) for name in stack.of_shard(stack.options.shard, "scheduler"))
    of_which = "" if alone else f" --scheduler {seeds}"
    print_plain(console, f"  {command} workers{of_which}")
    print_logs(console, stack)
    console.print("Ctrl-C stops everything.")


def print_logs(console: Console, stack: LocalStack) -> None:
    """Print the folder of the logs if they are kept and anything was started."""
    if stack.options.keep_logs and stack.dir != Path():
        print_plain(console, f"Logs: {stack.dir}")
