"""The ways in which vLLM is to order the same requests."""

from __future__ import annotations

from dataclasses import dataclass

FCFS = "vLLM, fcfs"
PRIORITY = "vLLM, priority by guess"
SHORTEST = "vLLM, priority by true length"
NO_HINT = "LAPS-SD, no hint"
CLASS = "LAPS-SD, class"
GUESS = "LAPS-SD, class and guess"
LEARNT = ", learnt before"


@dataclass(frozen=True)
class Mode:
    """A scheduler, and what requests say about themselves."""

    name: str
    scheduler: str
    """fcfs or priority: vLLM's own with this policy; laps: LAPS-SD."""
    sends_class: bool = False
    lengths: str = ""
    """Lengths that it receives: guessed, true, or none."""
    learnt: bool = False
    """It starts with what it has learnt from an earlier burst."""

    @property
    def hints(self) -> str:
        """Return the name of the file that holds what was learnt with these hints."""
        return f"{self.sends_class:d}-{self.lengths or 'none'}"


OURS = (
    Mode(NO_HINT, "laps"),
    Mode(CLASS, "laps", sends_class=True),
    Mode(GUESS, "laps", sends_class=True, lengths="guessed"),
)
WARM = tuple(
    Mode(mode.name + LEARNT, mode.scheduler, mode.sends_class, mode.lengths, learnt=True) for mode in OURS
)
MODES = (
    Mode(FCFS, "fcfs"),
    Mode(PRIORITY, "priority", lengths="guessed"),
    Mode(SHORTEST, "priority", lengths="true"),
    *OURS,
    *WARM,
)
"""The first is the one that all others are compared with: it shows the lengths that are guessed."""
CLOCK = (MODES[0], MODES[1], *OURS)
"""Those that are compared on the clock, where servers keep what they learn."""
