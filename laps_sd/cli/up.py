"""`laps-sd up`: the whole system on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TextIO, cast

import typer
from rich.console import Console

from laps_sd.cli import generate, operate
from laps_sd.cli.failures import with_next_step
from laps_sd.cli.up_output import line_printer, print_logs, print_plain, print_usage, progress_reporter
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.service.config import PREFIX, unknown_sentences
from laps_sd.service.cores import MOST_THREADS, usable_cores
from laps_sd.service.log import Outlet
from laps_sd.service.model_dir import served_name
from laps_sd.stack.local import LocalStack
from laps_sd.stack.log_watch import LogWatch
from laps_sd.stack.options import StackOptions, check_models, with_local_models
from laps_sd.stack.ports import Ports
from laps_sd.stack.record_watch import RecordWatch
from laps_sd.stack.running import Running, published, running
from laps_sd.stack.supervisor import Supervisor

DEMO_PROMPT = "Tell me a story about the harbour."
DEMO_TOKENS = 200
DEMO_MODEL = "laps-sd-demo"
"""Name of the shipped pair."""
DEMO_SEED = 8
LOOK_EVERY_S = 0.5

MODELS, SYSTEM, ADDRESSES, TERMINAL = "Models", "System", "Addresses and data", "Terminal"
"""Titles of the groups of options in --help."""


def up(
    context: typer.Context,
    named: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Target model: a directory, or its name on the Hugging Face hub, org/name[@revision] (default: the"
            " demo pair). The same as --target.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            envvar="LAPS_SD_TARGET",
            help="Target model, as MODEL.",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            envvar="LAPS_SD_DRAFT",
            help="Its draft model, a directory or a name as MODEL (default: none; draft tokens then come from"
            " prompt lookup).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_MODEL",
            help="Name that clients use (default: the name of the target, or of its directory).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    engine: Annotated[
        Literal["auto", "demo", "fake", "vllm"],
        typer.Option(
            envvar="LAPS_SD_ENGINE",
            help="auto: the target if one is given, else demo; demo: the shipped model pair; vllm: the same as auto, in"
            " vLLM, which the workers' Python environment must have; fake: no model, scripted tokens.",
            rich_help_panel=MODELS,
        ),
    ] = "auto",
    worker_python: Annotated[
        Path | None,
        typer.Option(
            help="Python interpreter of the workers, if another environment has the packages of their engine"
            " (vLLM and laps-sd itself); default: the one of this command.",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_DEVICE",
            help="cpu, cuda or cuda:N (default: cpu). On GPUs this engine is slow: --engine vllm is for them.",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_DTYPE",
            help="auto (default: that of the model where the device computes in it), float32, bfloat16 or float16.",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_QUANTIZATION",
            help="int8 or int4: quantise the weights of both models when they are loaded (default: none).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            envvar="LAPS_SD_CONTEXT_TOKENS",
            help="Maximum tokens of prompt and output of a request (default: the model's limit, at most 8192).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="LAPS_SD_SLOTS",
            help="Maximum requests in one round of a worker (default: 8).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            envvar="LAPS_SD_THREADS",
            help="CPU threads of each worker (default: the cores of this machine divided by the workers).",
            show_default=False,
            rich_help_panel=MODELS,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes of each shard.", rich_help_panel=SYSTEM)
    ] = 1,
    shards: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Shards: schedulers that share the requests among them.",
            rich_help_panel=SYSTEM,
        ),
    ] = 1,
    schedulers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Schedulers of each shard: one leads, the others take over when it dies.",
            rich_help_panel=SYSTEM,
        ),
    ] = 1,
    gateways: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Gateways; clients may use any of them. The first has the ports below, the others free ones.",
            rich_help_panel=SYSTEM,
        ),
    ] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_POLICY",
            help="Order of requests: laps-sd (default), laps-sd-paper, sd-index, srpt-length, sjf-length, las, mlfq"
            " or fcfs.",
            show_default=False,
            rich_help_panel=SYSTEM,
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="LAPS_SD_REDIS_URL",
            help="Redis or Valkey (default: embedded).",
            show_default=False,
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the embedded record, with prompts and outputs; only you can read it (0700)."
            " Default: a temporary one, deleted at the end; after a kill, at the next start.",
            show_default=False,
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    gateway_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="gRPC port of the first gateway; 0: a free one.",
            rich_help_panel=ADDRESSES,
        ),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="HTTP port of the first gateway (OpenAI); 0: a free one.",
            rich_help_panel=ADDRESSES,
        ),
    ] = 8000,
    scheduler_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="gRPC port of the first scheduler; 0: a free one.",
            rich_help_panel=ADDRESSES,
        ),
    ] = 50052,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65000,
            help="First of one metrics port per process; 0: free ones.",
            rich_help_panel=ADDRESSES,
        ),
    ] = 9090,
    demo: Annotated[
        bool,
        typer.Option("--demo/--no-demo", help="Send one prompt and show its text.", rich_help_panel=TERMINAL),
    ] = True,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Write debug logs, keep them after the end, and print their folder.",
            rich_help_panel=TERMINAL,
        ),
    ] = False,
) -> None:
    """Start record, scheduler, workers and gateway on this machine, show one prompt, and serve until Ctrl-C.

    A process that dies is started again on the same ports, after longer pauses (30 s at most) if it dies
    again and again.
    """
    # The system outlives its terminal: an SSH connection that broke, a pipe whose reader has left.
    console = Console(file=cast(TextIO, Outlet(sys.stderr)), highlight=False)
    for sentence in unknown_sentences():
        print_plain(console, f"laps-sd: {sentence}")
    if named is not None:
        given = context.get_parameter_source("target")
        if given is not None and given.name == "COMMANDLINE":
            raise StartupError(f"MODEL and --target are the same: give {named} or {target}, not both.")
        target = named
    threads, warning = threads_of_each(threads, engine, workers * shards)
    if warning:
        print_plain(console, f"laps-sd: {warning}")
    options = StackOptions(
        workers=workers,
        shards=shards,
        schedulers=schedulers,
        gateways=gateways,
        policy=policy,
        engine=engine,
        worker_python=worker_python,
        target=target,
        draft=draft,
        model=model or (DEMO_MODEL if target is None else served_name(target)),
        device=device,
        dtype=dtype,
        quantization=quantization,
        context_tokens=context_tokens,
        slots=slots,
        threads=threads,
        redis_url=redis_url,
        data_dir=data_dir,
        log_level="debug" if verbose else "info",
        keep_logs=verbose,
        # The services get the other settings of the shell too; those of the stack take precedence.
        environment={key: value for key, value in os.environ.items() if key.startswith(PREFIX)},
    )
    # Before anything starts: a mistake is seen in a second.
    options = with_local_models(options)
    check_models(options)
    ports = Ports(
        gateway=gateway_port, http=http_port, scheduler=scheduler_port, metrics=metrics_port or None
    )
    _serve(console, options, ports, demo=demo)


def _serve(console: Console, options: StackOptions, ports: Ports, *, demo: bool) -> None:
    """Start the system, show the demo, and supervise the processes until Ctrl-C; then stop them."""
    _on_interrupts(_interrupt)
    status, report = console.status("starting"), line_printer(console)
    stack = LocalStack(options, ports=ports, progress=progress_reporter(console, status))
    watch = LogWatch(stack, report=report).start()
    started = False
    try:
        with status:
            stack.start()
            watch.look()  # what the workers are, before the addresses
        started = True
        with (
            Supervisor(stack, report=report) as supervisor,
            RecordWatch(stack, report=report, describe=operate.outage_sentence),
            _published(console, stack) as alone,
        ):
            api_key = os.environ.get(f"{PREFIX}API_KEY")
            # Without the key that the gateway needs, the demo would be refused.
            if demo and options.workers and (api_key or f"{PREFIX}API_KEYS_FILE" not in os.environ):
                _show_demo(console, stack, api_key)
            print_usage(console, stack, alone=alone)
            while supervisor.failure is None:
                time.sleep(LOOK_EVERY_S)
            raise supervisor.failure
    except KeyboardInterrupt:
        if not started:
            raise
        console.print("\nstopping")
    finally:
        _on_interrupts(signal.SIG_IGN)  # none may interrupt the stop, which is bounded anyway
        watch.stop()  # that peers leave is what a stop looks like
        stack.stop()
        print_logs(console, stack)


def _on_interrupts(handler: Callable[[int, object], object] | signal.Handlers) -> None:
    """Handle what must end the children in order: Ctrl-C, SIGTERM, and the end of the terminal."""
    # A background job of a shell starts with SIGINT ignored; one with SIGHUP ignored (nohup) outlives its terminal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt for the first signal, and ignore all others."""
    _on_interrupts(signal.SIG_IGN)
    raise KeyboardInterrupt


def threads_of_each(wanted: int | None, engine: str, workers: int) -> tuple[int, str]:
    """Return the threads of each of these workers, and a sentence if all of them exceed the CPUs of this
    machine.

    Raises StartupError if a single worker's do.
    """
    usable = usable_cores()
    if wanted is None:
        each = usable.threads // max(1, workers)
        return 1 if engine == "vllm" else min(max(1, each), MOST_THREADS), ""
    if excess := usable.excess(wanted):
        raise StartupError(f"--threads {excess}.")
    if wanted > 1 and wanted * workers > usable.most_threads:
        return (
            wanted,
            f"{workers} workers of {wanted} threads share {usable.most_threads} CPUs, so they are slower than with fewer threads",
        )
    return wanted, ""


@contextlib.contextmanager
def _published(console: Console, stack: LocalStack) -> Iterator[bool]:
    """Publish the addresses for the other commands inside the context; yield whether these find this system
    alone."""
    schedulers: dict[str, list[str]] = {}
    for name, shard in stack.schedulers.items():
        schedulers.setdefault(shard, []).append(stack.address(name))
    with contextlib.ExitStack() as stack_of_files:
        try:
            one = Running(
                process=os.getpid(),
                gateway=stack.gateway_address,
                schedulers=schedulers,
                model=stack.options.model,
                folder=os.getcwd(),  # noqa: PTH109  a text
                redis=stack.redis_url,
            )
            stack_of_files.enter_context(published(one))
        except OSError as error:  # also a current directory that is gone
            print_plain(
                console,
                f"laps-sd: other commands need the addresses below, because they cannot be published: {error}",
            )
            yield False
        else:
            yield len(running()) == 1


def _show_demo(console: Console, stack: LocalStack, api_key: str | None) -> None:
    console.print(f"\n[bold]{DEMO_PROMPT}[/bold]")
    try:
        generate.demo(
            stack.gateway_address,
            DEMO_PROMPT,
            model=stack.options.model,
            max_tokens=DEMO_TOKENS,
            seed=DEMO_SEED,
            api_key=api_key,
        )
    except (LapsSdError, OSError) as error:  # the system serves on without its demo
        problem = str(error) if isinstance(error, OSError) else with_next_step(error)
        print_plain(console, f"laps-sd: {problem}")
