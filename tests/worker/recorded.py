"""A probe that remembers what it was given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from worker_svc.engine.length_probe.features import Features
from worker_svc.engine.length_probe.probe import LengthProbe, Watched


@dataclass
class Seen:
    """What a probe was given of one request."""

    looks: list[tuple[int, Features]] = field(default_factory=list)
    ends: list[tuple[int, bool]] = field(default_factory=list)


class Recorded(LengthProbe):
    """A probe that remembers what it was given, by request in the order of first looks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[int, Seen] = defaultdict(Seen)
        self._held: list[Watched] = []

    def look(self, watched: Watched, output_tokens: int, hidden: Features) -> float | None:
        self._held.append(watched)  # so that its id stays its own
        self.seen[id(watched)].looks.append((output_tokens, hidden.copy()))
        return super().look(watched, output_tokens, hidden)

    def learn(self, watched: Watched, output_tokens: int, *, cut: bool) -> None:
        self.seen[id(watched)].ends.append((output_tokens, cut))
        super().learn(watched, output_tokens, cut=cut)
