"""The probe's work after a round: it looks at a request once at most, and learns from one that has ended."""

from __future__ import annotations

from laps_sd.contract.ends import End
from worker_svc.engine.interface import RequestRound
from worker_svc.engine.length_probe.features import Features
from worker_svc.engine.length_probe.probe import LengthProbe, Watched

__all__ = ["with_prediction"]


def with_prediction(
    probe: LengthProbe, watched: Watched, report: RequestRound, hidden: Features | None, max_tokens: int
) -> RequestRound:
    """Look at a request after a round, and learn from it if it has ended; return its report, with a prediction if
    there is one.

    `hidden`: hidden state [hidden] of the last token of its context before the round; None: no look is due. The tokens
    of the round come off what was predicted before them.
    """
    if report.finish is End.ERROR:
        return report
    if hidden is not None:
        remaining = probe.look(watched, report.position, hidden)
        if remaining is not None and report.finish is None:
            left = min(remaining, max_tokens - report.position) - len(report.tokens)
            report = report._replace(predicted_remaining_tokens=max(1.0, left))
    if report.finish is not None:
        probe.learn(watched, report.position + len(report.tokens), cut=report.finish is End.LENGTH)
    return report
