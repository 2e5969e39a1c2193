"""The probe's part of the round: which requests it looks at, what it predicts of them, and what it learns."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from worker_svc.engine.interface import RequestRound
from worker_svc.engine.length_probe.outcome import with_prediction
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.round.request import RoundRequest


class Remaining:
    """Looks at the requests of rounds by `probe`; does nothing without one.

    A look is by the last token of the context before the round, whose place in the forward is known in
    advance.
    """

    def __init__(self, probe: LengthProbe | None) -> None:
        self.probe = probe
        """The probe; None without one, and after its first failure."""

    def mark(self, requests: SequenceOf[RoundRequest]) -> None:
        """Mark the requests that are due for a look and whose last token is in this round's forward."""
        if self.probe is None:
            return
        for request in requests:
            watched = request.sequence.watched
            if watched is None or request.context - watched.prompt_tokens < watched.due:
                continue
            if request.choices:
                request.looked_at = True

    def settle(
        self, requests: SequenceOf[RoundRequest], reports: SequenceOf[RequestRound]
    ) -> tuple[RequestRound, ...]:
        """Look at the marked requests, and learn from those that have ended; return the reports with
        predictions."""
        if self.probe is None:
            return tuple(reports)
        try:
            return self._settle(self.probe, requests, reports)
        except Exception:
            # The tokens of the round are committed: it must not fail any more.
            logging.getLogger(__name__).exception(
                "the probe failed: no output lengths are predicted any more"
            )
            self.probe = None
            return tuple(reports)

    def _settle(
        self, probe: LengthProbe, requests: SequenceOf[RoundRequest], reports: SequenceOf[RequestRound]
    ) -> tuple[RequestRound, ...]:
        settled = list(reports)
        for at, (request, report) in enumerate(zip(requests, reports, strict=True)):
            if not request.looked_at and report.finish is None:
                continue
            sequence = request.sequence
            if sequence.watched is not None:
                settled[at] = with_prediction(
                    probe, sequence.watched, report, request.hidden, sequence.spec.max_tokens
                )
        return tuple(settled)
