"""Counts of prompt tokens that workers found in their prefix caches, and that the scheduler believed to be there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FoundTokens:
    """Sums since the last `take`, and since the beginning, in prompt tokens."""

    expected: int = 0
    """Found, and believed to be there."""
    unexpected: int = 0
    """Found, but not believed to be there."""
    missing: int = 0
    """Believed to be there, and not found: the wrong beliefs."""
    computed: int = 0
    """Neither."""
    all_found: int = 0
    all_prompt: int = 0
    """Found, and all, since the beginning."""

    def count(self, prompt_tokens: int, believed: int, found: int) -> None:
        """Count a request that a worker took up."""
        believed, found = min(believed, prompt_tokens), min(found, prompt_tokens)
        self.expected += min(believed, found)
        self.unexpected += max(0, found - believed)
        self.missing += max(0, believed - found)
        self.computed += prompt_tokens - max(believed, found)
        self.all_found += found
        self.all_prompt += prompt_tokens

    def take(self) -> dict[str, int]:
        """Return the sums by name, and begin again."""
        sums = {
            "expected": self.expected,
            "unexpected": self.unexpected,
            "missing": self.missing,
            "computed": self.computed,
        }
        self.expected = self.unexpected = self.missing = self.computed = 0
        return sums
