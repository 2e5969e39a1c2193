"""Settings of the drop-in, from the environment of `vllm serve`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laps_sd.service.config import Settings, field
from scheduler_svc.core.policies import PolicyName

__all__ = ["VllmSettings"]


@dataclass(frozen=True, kw_only=True)
class VllmSettings(Settings):
    """LAPS-SD inside one vLLM server."""

    policy: PolicyName = field(
        "laps-sd", help="The order of requests; docs/policies.md describes each policy."
    )
    reserved_share: bool = field(
        True,
        help="Give one place in 32, at least one, to the oldest requests, so that no request waits forever.",
    )
    predict_lengths: bool = field(
        True,
        help="Predict the length of an output from the words of its prompt, as learned from earlier requests.",
    )
    length_key: str = field(
        "",
        help="Secret under which the words of prompts are hashed: without it LAPS_SD_LEARNT_FILE does not show which"
        " words were sent. With another one, predictions are learned again.",
        secret=True,
    )
    learnt_file: Path | None = field(
        None,
        help="File that keeps what the policy has learnt (lengths, acceptance, costs) over restarts; a data-parallel"
        " rank N > 0 appends .N. None: it is learnt again after each start.",
    )
    learnt_save_s: float = field(
        60.0,
        help="Time between two writes of LAPS_SD_LEARNT_FILE under load; without a request in the server it is written"
        " within 5 s, without the requests that ended less than 1 s after the copy before.",
        minimum=1.0,
    )

    def problems(self) -> Iterator[str]:
        """Return what no single field can check."""
        if self.learnt_file is None:
            return
        if self.learnt_file.is_dir():
            yield f"LAPS_SD_LEARNT_FILE must be a file, got the folder {self.learnt_file}"
        elif not self.learnt_file.parent.is_dir():
            yield f"LAPS_SD_LEARNT_FILE must be in a folder that exists, got {self.learnt_file}"
