"""All commands. An error is one sentence on stderr and a non-zero exit code."""

from __future__ import annotations

import importlib.util
import io
import os
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer

from laps_sd import __version__
from laps_sd.cli import chat, config, dial, generate, key, operate, up
from laps_sd.cli.failures import with_next_step
from laps_sd.cli.top.command import top
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.service.config import ConfigError
from laps_sd.service.flags import VersionOption, print_version, with_version
from laps_sd.stack.children import safe_path

app = typer.Typer(
    name="laps-sd",
    pretty_exceptions_enable=False,
)


@app.callback(no_args_is_help=True)
def root(version: VersionOption = False) -> None:
    """LAPS-SD serves language models with speculative decoding; the shortest requests run first."""


FIRST, OPERATE, PROGRAMS = "Start and use", "Look and act", "Single programs"
"""Titles of the groups of commands in --help."""
for _name, _command, _title in (
    ("up", up.up, FIRST),
    ("generate", generate.generate, FIRST),
    ("chat", chat.chat, FIRST),
    ("explain", operate.explain, OPERATE),
    ("queue", operate.queue, OPERATE),
    ("workers", operate.workers, OPERATE),
    ("drain", operate.drain, OPERATE),
    ("top", top, OPERATE),
    ("key", key.key, OPERATE),
):
    app.command(_name, rich_help_panel=_title)(with_version(_command))
app.command(
    "config",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel=OPERATE,
)(with_version(config.config))

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The arguments belong to the program that is run, --help included."""


def _exec(module: str, context: typer.Context, extra: str) -> NoReturn:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise StartupError(f"The {extra} is not installed: pip install 'laps-sd[{extra}]'.")
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606  this process becomes it


@app.command(context_settings=PASS_ON, rich_help_panel=PROGRAMS)
def gateway(context: typer.Context) -> None:
    """Run one gateway. `laps-sd gateway --help` lists its settings."""
    _exec("gateway", context, "gateway")


@app.command(context_settings=PASS_ON, rich_help_panel=PROGRAMS)
def scheduler(context: typer.Context) -> None:
    """Run one scheduler. `laps-sd scheduler --help` lists its settings."""
    _exec("scheduler_svc", context, "scheduler")


@app.command(context_settings=PASS_ON, rich_help_panel=PROGRAMS)
def worker(context: typer.Context) -> None:
    """Run one worker. `laps-sd worker --help` lists its settings."""
    _exec("worker_svc", context, "worker")


@app.command(context_settings=PASS_ON, rich_help_panel=PROGRAMS)
def record(context: typer.Context) -> None:
    """Print the record of a shard from Redis; needs no scheduler. `laps-sd record --help` lists its settings."""
    given = {argument.partition("=")[0] for argument in context.args}
    is_named = os.environ.get("LAPS_SD_REDIS_URL") or given & {"--redis-url", "--help", "--version"}
    if not is_named and (url := dial.record()):
        os.environ["LAPS_SD_REDIS_URL"] = url
    _exec("scheduler_svc.dump", context, "scheduler")


@app.command(context_settings=PASS_ON, rich_help_panel=PROGRAMS)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="File bench/NAME.py of a checkout.")] = None,
) -> None:
    """Run a benchmark of a checkout with the remaining arguments; without a name, list them."""
    if name == "--version":
        print_version(True)
    folder = _checkout() / "bench"
    programs = [path for path in folder.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    names = sorted(path.stem.replace("_", "-") for path in programs if not path.stem.startswith("_"))
    if name is None or name in ("--help", "-h"):
        print("Usage: laps-sd bench NAME [ARGUMENT ...]\n")
        print("Benchmarks: " + (", ".join(names) or "none yet"))
        return
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name.replace("_", "-") not in names:
        raise StartupError(f"There is no benchmark {name!r}; there are: {', '.join(names) or 'none yet'}.")
    root = folder.parent
    # The current directory stays: paths in the arguments, and those that are printed, are relative to it.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    # It runs as a module: for a script, `bench/gateway.py` would hide the package of the gateway.
    module = f"bench.{name.replace('-', '_')}"
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *context.args], environment)  # noqa: S606


def _checkout() -> Path:
    """Return the checkout that contains the current directory or this file."""
    for start in (Path.cwd(), Path(__file__).parent):
        for folder in (start, *start.parents):
            if (folder / "bench").is_dir() and (folder / "laps_sd" / "cli").is_dir():
                return folder
    raise StartupError(
        "Benchmarks are files of the repository: run `laps-sd bench` inside a checkout of laps-sd."
    )


@app.command(rich_help_panel=OPERATE)
@with_version
def version() -> None:
    """Print the versions of laps-sd, of Python and of gRPC."""
    import google.protobuf

    print(f"laps-sd {__version__}")
    print(
        f"python {platform.python_version()}, grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}"
    )


def run() -> NoReturn:
    """Run the command line. Print an expected error as one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # an output that is not UTF-8
    os.environ |= safe_path()  # for the programs that this process becomes or starts
    try:
        # Shell completion looks for this name, however the program was started.
        app(prog_name="laps-sd", standalone_mode=True)
    except (grpc.RpcError, LapsSdError) as error:
        sys.exit(f"laps-sd: {with_next_step(error)}")
    except ConfigError as error:
        print("\n".join(f"laps-sd: {problem}" for problem in error.problems), file=sys.stderr)
        sys.exit(2)
    except UnicodeEncodeError:  # Python has bytes that are not UTF-8 as surrogates, which have no encoding
        print("laps-sd: the arguments must be UTF-8", file=sys.stderr)
        sys.exit(2)
    except (StartupError, OSError) as error:  # OSError: a full disk, a directory that is gone
        sys.exit(f"laps-sd: {error}")
    sys.exit(0)
