"""Runs an engine to the end of its requests, with any changes that a scheduler might make in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker_svc.engine.interface import Engine, RequestRound, Residency, Specification

Between = Callable[[Engine, int, list[str]], Sequence[str]]


def everybody(engine: Engine, number: int, live: list[str]) -> Sequence[str]:
    """Return the first requests that fit, round after round, without preemption."""
    return live[: engine.capacity.slots]


def rotate(how: str, every: int = 3) -> Between:
    """Change the running requests every few rounds; those that pause keep their KV, lose it, or go to host
    memory.
    """

    def between(engine: Engine, number: int, live: list[str]) -> Sequence[str]:
        slots = engine.capacity.slots
        turn = number // every * max(1, slots // 2) % len(live)
        run = [*live[turn:], *live[:turn]][:slots]
        if number % every == 0:
            for name in live:
                if name not in run or number % (2 * every) == 0:
                    if how == "swap":
                        assert engine.swap_out(name)
                        assert engine.status(name).residency is not Residency.DEVICE
                    elif how == "evict":
                        engine.evict(name)
                        assert engine.status(name).target_blocks == 0
        return run

    return between


def finish_all(
    engine: Engine, specs: Iterable[Specification], between: Between = everybody
) -> tuple[dict[str, list[int]], dict[str, RequestRound], list[RequestRound]]:
    """Return output tokens by request (committed ones included), each one's last report, and all reports.

    Where rounds overlap a round returns the reports of the one before.
    """
    specs = list(specs)
    output = {spec.request_id: list(spec.committed_ids) for spec in specs}
    last: dict[str, RequestRound] = {}
    reports: list[RequestRound] = []
    for spec in specs:
        engine.add(spec)
    live = [spec.request_id for spec in specs]
    number = 0
    lag = engine.capacity.lag
    begun: deque[Sequence[str]] = deque([()] * lag)
    while live:
        run = between(engine, number, live)
        begun.append(run)
        result = engine.round(run)
        engine.check()  # type: ignore[attr-defined]
        assert [report.request_id for report in result.requests] == [
            name for name in begun.popleft() if name in live
        ]
        for report in result.requests:
            assert report.position == len(output[report.request_id])
            assert len(report.tokens) <= report.accepted + 1
            assert report.accepted <= report.drafted
            output[report.request_id].extend(report.tokens)
            if report.finish is not None:
                last[report.request_id] = report
                live.remove(report.request_id)
                assert engine.status(report.request_id).target_blocks == 0
        reports.extend(result.requests)
        number += 1
        assert number < 20000, "no progress"
    for _ in range(lag):
        engine.round(())
    for spec in specs:
        engine.drop(spec.request_id)
    assert not engine.known()
    return output, last, reports
