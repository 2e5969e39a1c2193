"""The ways in which vLLM is to order the same requests."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

FCFS = "vLLM, fcfs"
PRIORITY = "vLLM, priority by guess"
SHORTEST = "vLLM, priority by true length"
NO_HINT = "LAPS-SD, no hint"
UNPREDICTED = "LAPS-SD, no hint, no prediction"
CLASS = "LAPS-SD, class"
GUESS = "LAPS-SD, class and guess"
LEARNT = ", learnt before"


@dataclass(frozen=True)
class Mode:
    """A scheduler, and the hints that requests bring."""

    name: str
    scheduler: str
    """fcfs or priority: vLLM's own with this policy; laps: LAPS-SD."""
    sends_class: bool = False
    lengths: str = ""
    """Lengths that it receives: guessed, true, or none."""
    predicts: bool = True
    """LAPS-SD predicts lengths from the words of prompts."""
    learnt: bool = False
    """It starts with what it has learnt from an earlier burst."""

    @property
    def file_name(self) -> str:
        """Return the name of the file that holds what was learnt in this mode."""
        return f"learnt-{self.sends_class:d}-{self.lengths or 'none'}-{self.predicts:d}.json"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of its server."""
        return {} if self.predicts else {"LAPS_SD_PREDICT_LENGTHS": "off"}

    def environment_in(self, folder: Path) -> dict[str, str]:
        """Return the variables of its server, which starts with what the folder has as learnt before, if it does."""
        if not self.learnt:
            return self.environment
        # A copy, because the scheduler adds what it learns in the run, and the same requests come again.
        copied = shutil.copyfile(folder / self.file_name, folder / "learnt-in-this-run.json")
        return self.environment | {"LAPS_SD_LEARNT_FILE": str(copied)}


OURS = (
    Mode(NO_HINT, "laps"),
    Mode(CLASS, "laps", sends_class=True),
    Mode(GUESS, "laps", sends_class=True, lengths="guessed"),
)
BEFORE = Mode(UNPREDICTED, "laps", predicts=False)
WARM = tuple(replace(mode, name=mode.name + LEARNT, learnt=True) for mode in (BEFORE, *OURS))
MODES = (
    Mode(FCFS, "fcfs"),
    Mode(PRIORITY, "priority", lengths="guessed"),
    Mode(SHORTEST, "priority", lengths="true"),
    BEFORE,
    *OURS,
    *WARM,
)
"""The first is the one that all others are compared with: it shows the lengths that are guessed."""
CLOCK = (MODES[0], MODES[1], BEFORE, *OURS)
"""Those that are compared on the clock, where servers keep what they learn."""
