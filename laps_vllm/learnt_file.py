"""The file that keeps what the policy has learnt over restarts of a vLLM server.

It holds counts, means, histograms and weights of hashed words: no prompt and no request id. A damaged or
foreign file is not an error: learning starts again. A digest of the rest is in the file, because most numbers can
be read in place of others, and the server would end with an exception only when it computes with them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_svc.core.estimates.priors import FORMAT, Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths

__all__ = ["MAX_FILE_BYTES", "LearntFile"]

MAX_FILE_BYTES = 64 * 2**20
"""Larger files are not read: 256 classes take less than a tenth of this."""
DIGEST = "digest"
"""Field with the digest of all others."""


class LearntFile:
    """One file of one data-parallel rank."""

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path = path.with_name(f"{path.name}.{rank}") if rank else path
        self._kept: dict[str, Any] | None = None

    def load(self, predictor: Callable[[], PromptLengths] = PromptLengths) -> tuple[Priors, str]:
        """Return the priors of the file and a sentence about them; new priors if there are none to read.
        `predictor` returns the predictor of lengths, before it has learnt: what was learnt for another one is
        not used.
        """
        priors, sentence = self._read(predictor)
        return priors or Priors(predictor()), sentence

    def _read(self, predictor: Callable[[], PromptLengths]) -> tuple[Priors | None, str]:
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                return None, f"{self.path} has more than {MAX_FILE_BYTES} bytes, and is not used"
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is not a mapping")
            if found.pop(DIGEST, None) != _digest(found):
                raise ValueError("the digest is another one")
            if found.get("format") != FORMAT:
                return None, f"{self.path} was written by another version of LAPS-SD, and is not used"
            priors = Priors.from_dict(found, predictor())
            if priors.lacks_words_of(found):
                return (
                    priors,
                    f"read from {self.path}, without the words of prompts, which were read otherwise",
                )
            return priors, f"read from {self.path}"
        except FileNotFoundError:
            return None, f"{self.path} does not exist yet"
        except OSError as error:
            return None, f"{self.path} cannot be read ({error.strerror})"
        except (ValueError, RecursionError) as error:
            return None, f"{self.path} does not hold what a LAPS-SD scheduler wrote, and is not used: {error}"

    def keep(self, priors: Priors) -> None:
        """Copy the priors for the next `save`, which another thread may call."""
        self._kept = priors.to_dict()

    def save(self) -> None:
        """Replace the file by what was kept since the last call, if anything was; only its owner can read the new
        one, since it shows whether a guessed sentence was sent. Raises OSError.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return
        blob = _json({**kept, DIGEST: _digest(kept)})
        scratch = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            scratch.touch(mode=0o600)
            scratch.write_text(blob, encoding="utf-8")
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)


def _json(what: dict[str, Any]) -> str:
    return json.dumps(what, separators=(",", ":"))


def _digest(learnt: dict[str, Any]) -> str:
    """Return a digest of what was learnt. It is the same after the way through the file."""
    return hashlib.blake2b(_json(learnt).encode(), digest_size=16).hexdigest()
