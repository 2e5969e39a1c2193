"""What an operator asks: explain, queue, workers, drain."""

from __future__ import annotations

import json
import shutil
import time
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

from laps_sd.cli import dial
from laps_sd.cli.timeline import timeline
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
    tls_name: dial.TlsNameOption = "",
    as_json: dial.JsonOption = False,
) -> None:
    """Say where a request stands and why: level, rank, estimate (seconds of machine time) and story."""
    with dial.channel(dial.gateway(url), tls_ca, name=tls_name) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        reply = stub.Explain(
            pb.ExplainRequest(request_id=request_id), timeout=TIMEOUT_S, metadata=dial.metadata(api_key)
        )
    if as_json:
        _print_json(reply.explanation)
        return
    for line in explanation_lines(reply.explanation):
        print(line)


def explanation_lines(e: pb.Explanation) -> list[str]:
    """An explanation as a person reads it."""
    state = pb.Explanation.State.Name(e.state).removeprefix("STATE_").lower()
    if e.state == pb.Explanation.STATE_ENDED:
        state += ", " + reason_text(e.finish_reason)
    lines = [f"{e.request_id}  {state}" + (f" on {e.worker_id}" if e.worker_id else "")]
    if e.state != pb.Explanation.STATE_ENDED:
        place = [f"policy {e.policy}"]
        if e.HasField("level"):
            place.append(f"level {e.level}")
        if e.HasField("perceptible"):
            place.append("perceptible" if e.perceptible else "non-perceptible")
        lines.append(", ".join([*place, f"{e.ahead} requests before it{_why_ahead(e)}"]))
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


def _why_ahead(e: pb.Explanation) -> str:
    """What puts them there, unless it is only what the next line says."""
    told = {
        "of higher priority": e.ahead_by_priority,
        "of tenants that had less": e.ahead_by_tenant,
        "at lower levels": e.ahead_by_level,
    }
    if not any(told.values()):
        return ""
    told["sooner by its order"] = max(0, e.ahead - sum(told.values()))
    return ": " + ", ".join(f"{count} {why}" for why, count in told.items() if count)


def queue(
    scheduler: dial.SchedulerOption = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Entries at most.")] = 20,
    as_json: dial.JsonOption = False,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Show the queue of a shard, best first (times in seconds)."""
    reply = dial.call_leader(
        scheduler,
        lambda channel: admin_pb2_grpc.AdminStub(channel).ListQueue(
            admin_pb2.ListQueueRequest(limit=limit), timeout=TIMEOUT_S
        ),
        ca=tls_ca,
        cert=tls_cert,
        key=tls_key,
    )
    if as_json:
        _print_json(reply)
        return
    _show_outage(reply)
    _show(queue_table(reply))
    print(f"{reply.total} requests" + (f", by {reply.policy}" if reply.policy else ""))


def queue_table(reply: admin_pb2.ListQueueResponse) -> Table:
    """The queue as a person reads it; what the policy does not have is left out."""
    table = _table("request", "state", "prio", "ordered by", "waiting s", "attained s", "tokens", "worker")
    if any(e.HasField("perceptible") for e in reply.entries):
        table.add_column("perceptible")
    for e in reply.entries:
        state = pb.Explanation.State.Name(e.state).removeprefix("STATE_").lower()
        known = ["yes" if e.perceptible else "no"] if e.HasField("perceptible") else []
        table.add_row(
            e.request_id,
            state,
            str(e.priority),
            e.ordered_by,
            f"{e.waiting_s:.1f}",
            f"{e.attained_s:.3f}",
            str(e.emitted_tokens),
            e.worker_id,
            *known,
        )
    return table


def outage_sentence(outage: admin_pb2.RecordOutage) -> str:
    """Say since when the record cannot be written, and why."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - outage.lasts_s))
    return (
        f"the record cannot be written since {since} ({outage.lasts_s:.0f} s), {outage.fault}: {outage.error.rstrip('.')}. "
        "Nothing is admitted or shown until it can be"
    )


def _show_outage(reply: admin_pb2.ListQueueResponse | admin_pb2.ListWorkersResponse) -> None:
    if reply.HasField("record_outage"):
        print(outage_sentence(reply.record_outage))


def _table(*columns: str) -> Table:
    """Narrow: nothing but a line below the heads."""
    return Table(*columns, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def _show(table: Table) -> None:
    """As wide as it is: an id or a number that is cut off is of no use, whatever the terminal's width."""
    console = Console()
    console.width = max(
        console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum
    )
    console.print(table)


def workers(
    scheduler: dial.SchedulerOption = None,
    as_json: dial.JsonOption = False,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Show the workers of a shard and what they carry."""
    reply = dial.call_leader(
        scheduler,
        lambda channel: admin_pb2_grpc.AdminStub(channel).ListWorkers(
            admin_pb2.ListWorkersRequest(), timeout=TIMEOUT_S
        ),
        ca=tls_ca,
        cert=tls_cert,
        key=tls_key,
    )
    if as_json:
        _print_json(reply)
        return
    _show_outage(reply)
    table = _table(
        "worker", "device", "state", "running", "listed", "free blocks", "rounds", "accepted", "tokens/s"
    )
    for w in reply.workers:
        state = "gone" if not w.connected else "draining" if w.draining else "up"
        table.add_row(
            w.worker_name or w.worker_id,
            w.device,
            state,
            f"{w.running}/{w.slots}",
            str(w.listed),
            f"{w.free_target_blocks}/{w.target_blocks}",
            str(w.rounds),
            f"{w.acceptance:.0%}",
            f"{w.tokens_per_s:.1f}",
        )
    _show(table)


def drain(
    worker: Annotated[str, typer.Argument(help="Name or id, as `laps-sd workers` shows it.")],
    scheduler: dial.SchedulerOption = None,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Ask a worker to leave: no new work, its requests move elsewhere or finish."""
    reply = dial.call_leader(
        scheduler,
        lambda channel: admin_pb2_grpc.AdminStub(channel).DrainWorker(
            admin_pb2.DrainWorkerRequest(worker=worker), timeout=TIMEOUT_S
        ),
        ca=tls_ca,
        cert=tls_cert,
        key=tls_key,
    )
    print(f"{reply.worker_id} drains")


def _print_json(message: Message) -> None:
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    print(json.dumps(fields, indent=2, ensure_ascii=False))
