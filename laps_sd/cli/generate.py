"""`laps-sd generate`: one request through the public API, its text, and statistics of speculation."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from laps_sd.cli import ask, dial
from laps_sd.cli.failures import within
from laps_sd.client import Client, Event
from laps_sd.errors import LapsSdError
from laps_sd.service.ends import reason_text
from laps_sd.v1 import inference_pb2 as pb

DEMO_TIMEOUT_S = 120.0
SILENT_S = 10.0
"""Seconds without a word after which a terminal shows what the request waits for."""


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads standard input.")],
    url: dial.UrlOption = None,
    model: ask.ModelOption = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the text unchanged, without the model's chat template.")
    ] = False,
    system: ask.SystemOption = None,
    max_tokens: ask.MaxTokensOption = None,
    temperature: ask.TemperatureOption = None,
    top_p: ask.TopPOption = None,
    top_k: ask.TopKOption = None,
    seed: ask.SeedOption = None,
    stop: ask.StopOption = None,
    priority: ask.PriorityOption = None,
    time_limit: ask.TimeLimitOption = None,
    timeout: ask.TimeoutOption = None,
    draft_tokens: ask.DraftTokensOption = None,
    expected_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=ask.MAX_COUNT,
            help="Expected output length in tokens, a hint for the scheduler.",
            show_default=False,
        ),
    ] = None,
    workload_class: ask.ClassOption = "",
    idempotency_key: Annotated[
        str, typer.Option(help="A repeated call with the same key and body attaches to the first request.")
    ] = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the request running when this command ends.")
    ] = False,
    api_key: dial.ApiKeyOption = None,
    tls_ca: dial.CaOption = None,
    tls_cert: dial.CertOption = None,
    tls_key: dial.KeyOption = None,
    tls_name: dial.TlsNameOption = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each message of the stream as a JSON line.")
    ] = False,
) -> None:
    """Generate text and print it as it arrives; the last line (on stderr) shows statistics of speculation."""
    with ask.only_utf8():
        text = sys.stdin.read() if prompt == "-" else prompt
        request = ask.make_request(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            priority=priority,
            time_limit=time_limit,
            draft_tokens=draft_tokens,
            workload_class=workload_class,
        )
        request.idempotency_key = idempotency_key
        request.keep = keep
    if expected_tokens is not None:
        request.expected_output_tokens = expected_tokens
    files = dial.tls_files(tls_ca, tls_cert, tls_key)
    with dial.client(url, files, name=tls_name, api_key=api_key) as client:
        chat = not raw and ask.has_template(client, model)
        with ask.only_utf8():
            put_prompt(request, text, system=system, chat=chat)
        events = client.send(request, timeout_s=timeout)
        try:
            with within(timeout):
                ended = print_json(events) if as_json else print_text(events, client)
        finally:
            events.close()
    if ended is None or ended.finish_reason == pb.FINISH_REASON_ERROR:
        raise typer.Exit(1)


def put_prompt(request: pb.GenerateRequest, text: str, *, chat: bool, system: str | None = None) -> None:
    """Set the prompt of a request, as chat messages or as plain text."""
    if not chat:
        if system is not None:
            raise typer.BadParameter("--system needs a chat template: leave out --raw, or name a chat model")
        request.text = text
        return
    if system is not None:
        request.messages.messages.add(role="system", content=system)
    request.messages.messages.add(role="user", content=text)


def print_text(events: Iterable[Event], client: Client) -> pb.Ended | None:
    """Print the text on stdout as it arrives and the summary on stderr. Return the end, if there was one."""
    ended: pb.Ended | None = None
    begun = False
    with contextlib.ExitStack() as until_it_begins:
        try:
            for event in events:
                match event:
                    case pb.Accepted():
                        until_it_begins.callback(_explain_later(client, event.request_id))
                    case pb.Delta():
                        until_it_begins.close()
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                        begun = True
                    case pb.Ended():
                        ended = event
        finally:
            if begun or ended is not None:
                sys.stdout.write("\n")
                sys.stdout.flush()
    if ended is not None:
        print(summary(ended), file=sys.stderr)
    return ended


def _explain_later(client: Client, request_id: str) -> Callable[[], None]:
    """Show on a terminal, after a while, what a queued request waits for. Return what prevents it."""

    def explain() -> None:
        with contextlib.suppress(LapsSdError, ValueError):  # ValueError: the client is closed
            found = client.explain(request_id, timeout_s=ask.LIST_TIMEOUT_S)
            if found.state == pb.Explanation.STATE_QUEUED:
                reason = found.waits_for or f"its turn: {found.ahead} before it"
                print(f"-- it waits for {reason}  [{request_id}]", file=sys.stderr)

    timer = threading.Timer(SILENT_S, explain)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    return timer.cancel


def print_json(events: Iterable[Event]) -> pb.Ended | None:
    """Print each message as a line of JSON. Return the end, if there was one."""
    ended: pb.Ended | None = None
    for event in events:
        match event:
            case pb.Accepted():
                message = pb.GenerateEvent(accepted=event)
            case pb.Delta():
                message = pb.GenerateEvent(delta=event)
            case pb.Ended():
                message = pb.GenerateEvent(end=event)
                ended = event
        print(
            json.dumps(MessageToDict(message, preserving_proto_field_name=True), ensure_ascii=False),
            flush=True,
        )
    return ended


def summary(ended: pb.Ended) -> str:
    """Return one line about how a request ended."""
    reason = reason_text(ended.finish_reason).replace("_", " ")
    if ended.error:
        reason += f" ({ended.error})"
    speculation, timing = ended.speculation, ended.timing
    pace = ended.usage.completion_tokens / speculation.rounds if speculation.rounds else 0.0
    share = f" ({speculation.accepted / speculation.drafted:.0%})" if speculation.drafted else ""
    return (
        f"-- {reason}: {ended.usage.completion_tokens} tokens in {speculation.rounds} rounds, "
        f"drafted {speculation.drafted}, accepted {speculation.accepted}{share}, "
        f"{pace:.2f} tokens per round; "
        f"queued {timing.queued_s:.2f} s, first token {timing.first_token_s:.2f} s, total {timing.total_s:.2f} s, "
        f"preempted {timing.preemptions} times  [{ended.request_id}]"
    )


def demo(
    address: str, prompt: str, *, model: str, max_tokens: int, seed: int, api_key: str | None
) -> pb.Ended | None:
    """Send the request that `laps-sd up` shows, and print its text."""
    request = pb.GenerateRequest(model=model, sampling=pb.SamplingParams(max_tokens=max_tokens, seed=seed))
    with dial.client(address, api_key=api_key) as client:
        put_prompt(request, prompt, chat=ask.has_template(client, model))
        return print_text(client.send(request, timeout_s=DEMO_TIMEOUT_S), client)
