"""The learnt states of the workers' probes of output lengths, kept for the workers that connect later."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from laps_sd.contract.length_probe import LearntProbe, ProbeKind, problem_with
from laps_sd.service.log import get_logger

__all__ = ["MAX_KINDS", "Probes"]

log = get_logger(__name__)

MAX_KINDS = 4
"""Kinds of probes that are kept (our choice): one shard has one target model, and another one during a change."""
FORMAT = 1
"""Format of the record's copy; another one is not read."""


class Probes:
    """For each kind of probe the one that has learnt from the most requests."""

    def __init__(self) -> None:
        self._by_kind: dict[ProbeKind, LearntProbe] = {}
        self.unsaved = False
        """True if something has changed since the owner last saved it, and set this to False."""

    def of(self, kind: ProbeKind) -> LearntProbe | None:
        """Return the probe of this kind, if there is one."""
        return self._by_kind.get(kind)

    def take(self, learnt: LearntProbe) -> str:
        """Keep what a worker has learnt, unless another has learnt from more requests.

        Returns what is wrong with it; empty: nothing. The kind that changed least recently makes room for a new one.
        """
        known = self._by_kind.get(learnt.kind)
        if known is not None and known.requests > learnt.requests:
            return ""
        if problem := problem_with(learnt):
            return problem
        self._by_kind.pop(learnt.kind, None)
        while len(self._by_kind) >= MAX_KINDS:
            del self._by_kind[next(iter(self._by_kind))]
        self._by_kind[learnt.kind] = learnt
        self.unsaved = True
        return ""

    def to_blob(self) -> bytes:
        """Return the record's copy."""
        probes = [
            {
                "model": one.kind.model,
                "layer": one.kind.layer,
                "seed": one.kind.seed,
                "dims": one.kind.dims,
                "requests": one.requests,
                "numbers": base64.b64encode(one.numbers).decode(),
            }
            for one in self._by_kind.values()
        ]
        return json.dumps({"format": FORMAT, "probes": probes}, separators=(",", ":")).encode()

    @classmethod
    def from_blob(cls, blob: bytes | None) -> Probes:
        """Return what the record's copy holds; what cannot be read is left out: the workers learn it again."""
        probes = cls()
        try:
            read: dict[str, Any] = json.loads(blob) if blob else {"format": FORMAT, "probes": []}
            if read["format"] != FORMAT:
                raise ValueError("another version of LAPS-SD wrote them")
            for entry in read["probes"]:
                probes.take(_probe(entry))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = f"the probes of workers: {error!r}"
            log.warning("what was learnt cannot be used: learning starts again", reason=reason)
        probes.unsaved = False
        return probes


def _probe(entry: Mapping[str, Any]) -> LearntProbe:
    """Raises ValueError, KeyError, TypeError or OverflowError for something else than `to_blob` writes."""
    layer, seed, dims, requests = (int(entry[name]) for name in ("layer", "seed", "dims", "requests"))
    try:
        numbers = base64.b64decode(entry["numbers"], validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    return LearntProbe(ProbeKind(str(entry["model"]), layer, seed, dims), requests, numbers)
