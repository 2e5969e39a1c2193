"""The commands of an operator: explain, queue, workers, drain."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from laps_sd.cli import dial
from laps_sd.cli.failures import with_next_step
from laps_sd.cli.leader import Leader
from laps_sd.cli.states import request_state, worker_state
from laps_sd.cli.tables import Column, fitted, output_width
from laps_sd.cli.timeline import timeline
from laps_sd.cli.watch import EVERY_S, show, watch
from laps_sd.service.ends import reason_text
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb

TIMEOUT_S = 10.0
BESIDE_THE_BAR, SHORTEST_BAR, LONGEST_BAR = 24, 10, 80  # characters


def explain(
    request_id: Annotated[str, typer.Argument(help="As the last line of `generate` names it.")],
    url: dial.UrlOption = None,
    api_key: dial.ApiKeyOption = None,
    tls_ca: dial.CaOption = None,
    tls_cert: dial.CertOption = None,
    tls_key: dial.KeyOption = None,
    tls_name: dial.TlsNameOption = "",
    as_json: dial.JsonOption = False,
) -> None:
    """Show the place of a request and its reasons: level, rank, estimate (seconds of machine time) and timeline."""
    with dial.channel(dial.gateway(url), dial.tls_files(tls_ca, tls_cert, tls_key), tls_name) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        reply = stub.Explain(
            pb.ExplainRequest(request_id=request_id), timeout=TIMEOUT_S, metadata=dial.metadata(api_key)
        )
    if as_json:
        print(_json(reply.explanation))
        return
    for line in explanation_lines(reply.explanation):
        print(line)


def explanation_lines(e: pb.Explanation) -> list[str]:
    """Return an explanation as a person reads it."""
    state = request_state(e.state)
    if e.state == pb.Explanation.STATE_ENDED:
        state += ", " + reason_text(e.finish_reason) + (f": {e.basis}" if e.basis else "")
    lines = [f"{e.request_id}  {state}" + (f" on {e.worker_id}" if e.worker_id else "")]
    if e.state != pb.Explanation.STATE_ENDED:
        place = [f"policy {e.policy}"]
        if e.HasField("level"):
            place.append(f"level {e.level}")
        if e.HasField("perceptible"):
            place.append("perceptible" if e.perceptible else "non-perceptible")
        lines.append(", ".join([*place, f"{_requests(e.ahead)} before it{_why_ahead(e)}"]))
        if e.ordered_by:
            lines.append(f"ordered by {e.ordered_by}")
        if e.waits_for:
            lines.append(f"waits for {e.waits_for}")
        if e.reserved:
            lines.append("among the oldest: they have a share of the slots whatever their rank")
        if e.tenant_ahead:
            lines.append("waits for requests of other tenants: its own has had more service than they")
        lines.append(
            f"remaining {e.remaining_s:.3f} s (between {e.remaining_low_s:.3f} and {e.remaining_high_s:.3f})"
            + (f": {e.basis}" if e.basis else "")
        )
    lines.append(
        f"attained {e.attained_s:.3f} s, {e.emitted_tokens} tokens in {e.rounds} rounds, "
        f"drafted {e.drafted}, accepted {e.accepted}, preempted {e.preemptions} times"
    )
    room = shutil.get_terminal_size().columns - BESIDE_THE_BAR
    lines += timeline(
        e.story,
        ended=e.state == pb.Explanation.STATE_ENDED,
        width=max(SHORTEST_BAR, min(room, LONGEST_BAR)),
        until_s=e.age_s,
    )
    lines += [f"  {line.at_s:9.3f} s  {line.what:<12} {line.detail}".rstrip() for line in e.story]
    return lines


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _why_ahead(e: pb.Explanation) -> str:
    """Return what puts them there; empty if it is only the order in the next line."""
    reasons = {
        "of higher priority": e.ahead_by_priority,
        "of tenants that had less": e.ahead_by_tenant,
        "at lower levels": e.ahead_by_level,
    }
    if not any(reasons.values()):
        return ""
    reasons["sooner by its order"] = max(0, e.ahead - sum(reasons.values()))
    return ": " + ", ".join(f"{count} {why}" for why, count in reasons.items() if count)


WatchOption = Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")]


def queue(
    scheduler: dial.SchedulerOption = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Entries at most.")] = 20,
    as_json: dial.JsonOption = False,
    watched: WatchOption = False,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Show the queue of a shard, best first (times in seconds).

    On a narrow terminal the least important columns are left out; --json has all.
    """
    request = admin_pb2.ListQueueRequest(limit=limit)

    def tables(reply: admin_pb2.ListQueueResponse) -> list[RenderableType]:
        total = _requests(reply.total) + (f", by {reply.policy}" if reply.policy else "")
        return [*_outage(reply), queue_table(reply, output_width()), Text(total)]

    with _admin(scheduler, tls_ca, tls_cert, tls_key) as call:
        _show(
            lambda: call(lambda admin: admin.ListQueue(request, timeout=TIMEOUT_S)),
            tables,
            watched=watched,
            as_json=as_json,
        )


def queue_table(reply: admin_pb2.ListQueueResponse, width: int | None = None) -> Table:
    """Return the queue as a person reads it, at most `width` wide; what the policy does not have is left out."""
    entries = reply.entries
    columns = [
        Column("request", [e.request_id for e in entries]),
        Column("state", [request_state(e.state) for e in entries], 1),
        Column("prio", [str(e.priority) for e in entries], 7),
        Column("ordered by", [e.ordered_by for e in entries], 5, shortest=16),
        Column("waiting s", [f"{e.waiting_s:.1f}" for e in entries], 2),
        Column("attained s", [f"{e.attained_s:.3f}" for e in entries], 6),
        Column("tokens", [str(e.emitted_tokens) for e in entries], 3),
        Column("worker", [e.worker_id for e in entries], 4),
    ]
    if any(e.HasField("perceptible") for e in entries):
        known = [("yes" if e.perceptible else "no") if e.HasField("perceptible") else "" for e in entries]
        columns.append(Column("perceptible", known, 8))
    return fitted(columns, width)


def outage_sentence(outage: admin_pb2.RecordOutage) -> str:
    """Return since when the record cannot be written, and why."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - outage.lasts_s))
    return (
        f"the record cannot be written since {since} ({outage.lasts_s:.0f} s), {outage.fault}: {outage.error.rstrip('.')}. "
        "Nothing is admitted or shown until it can be"
    )


def _outage(reply: admin_pb2.ListQueueResponse | admin_pb2.ListWorkersResponse) -> list[RenderableType]:
    return [Text(outage_sentence(reply.record_outage))] if reply.HasField("record_outage") else []


def workers(
    scheduler: dial.SchedulerOption = None,
    as_json: dial.JsonOption = False,
    watched: WatchOption = False,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Show the workers of a shard and what they carry.

    On a narrow terminal the least important columns are left out; --json has all.
    """
    request = admin_pb2.ListWorkersRequest()

    def tables(reply: admin_pb2.ListWorkersResponse) -> list[RenderableType]:
        return [*_outage(reply), workers_table(reply, output_width())]

    with _admin(scheduler, tls_ca, tls_cert, tls_key) as call:
        _show(
            lambda: call(lambda admin: admin.ListWorkers(request, timeout=TIMEOUT_S)),
            tables,
            watched=watched,
            as_json=as_json,
        )


def workers_table(reply: admin_pb2.ListWorkersResponse, width: int | None = None) -> Table:
    """Return the workers as a person reads them, at most `width` wide."""
    found = reply.workers
    return fitted(
        [
            Column("worker", [w.worker_name or w.worker_id for w in found]),
            Column("device", [w.device for w in found], 7, shortest=8),
            Column("state", [worker_state(w) for w in found], 1),
            Column("running", [f"{w.running}/{w.slots}" for w in found], 2),
            Column("listed", [str(w.listed) for w in found], 5),
            Column("free blocks", [f"{w.free_target_blocks}/{w.target_blocks}" for w in found], 6),
            Column("rounds", [str(w.rounds) for w in found], 8),
            Column("accepted", [f"{w.acceptance:.0%}" for w in found], 4),
            Column("tokens/s", [f"{w.tokens_per_s:.1f}" for w in found], 3),
        ],
        width,
    )


Reply = TypeVar("Reply", bound=Message)


class _Call(Protocol):
    """Makes a call of the Admin service of a leader."""

    def __call__(self, call: Callable[[admin_pb2_grpc.AdminStub], Reply], /) -> Reply: ...


@contextmanager
def _admin(scheduler: str | None, ca: Path | None, cert: Path | None, key: Path | None) -> Iterator[_Call]:
    """Return what calls the leader of a shard; see `dial.schedulers`, `dial.tls_files` and `Leader.call`."""
    with closing(Leader(dial.schedulers(scheduler), dial.tls_files(ca, cert, key))) as leader:

        def made(call: Callable[[admin_pb2_grpc.AdminStub], Reply]) -> Reply:
            return leader.call(lambda channel: call(admin_pb2_grpc.AdminStub(channel)))

        yield made


def _show(
    call: Callable[[], Reply],
    tables: Callable[[Reply], Sequence[RenderableType]],
    *,
    watched: bool,
    as_json: bool,
) -> None:
    """Print what a call returns, once or until Ctrl-C: as tables, or as JSON."""
    if as_json:  # lines, also on a terminal
        _print_json_lines(lambda: _json(call(), indent=None if watched else 2), watched=watched)
    elif watched:
        watch(lambda: tables(call()))
    else:
        show(tables(call()))


def _print_json_lines(read: Callable[[], str], *, watched: bool) -> None:
    try:
        while True:
            try:
                print(read(), flush=True)
            except grpc.RpcError as error:
                if not watched:
                    raise
                print(f"laps-sd: {with_next_step(error)}", file=sys.stderr)
            if not watched:
                return
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        if not watched:
            raise


def drain(
    worker: Annotated[str, typer.Argument(help="Name or id, as `laps-sd workers` shows it.")],
    scheduler: dial.SchedulerOption = None,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Drain a worker: no new work, its requests move elsewhere or finish."""
    request = admin_pb2.DrainWorkerRequest(worker=worker)
    with _admin(scheduler, tls_ca, tls_cert, tls_key) as call:
        reply = call(lambda admin: admin.DrainWorker(request, timeout=TIMEOUT_S))
    print(f"{reply.worker_id} drains")


def _json(message: Message, *, indent: int | None = 2) -> str:
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields, indent=indent, ensure_ascii=False)
