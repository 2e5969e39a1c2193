"""The prefix cache of a virtual worker: which blocks of prompts have their KV there, as on a real one
(`worker_svc.engine.cache.blocks`): blocks that no request uses stay until their space is needed, the least recently
used one goes first.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    """Blocks by the numbers of their names (`laps_sd.contract.prompt_blocks`)."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        """Requests that use each block."""
        self.idle: dict[int, None] = {}
        """Blocks that no request uses, the least recently used one first."""
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def find(self, names: Sequence[int], most: int) -> int:
        """Return how many of these blocks, from the first on and at most `most`, are here."""
        used, idle = self.used, self.idle
        for at in range(min(most, len(names))):
            name = names[at]
            if name not in used and name not in idle:
                return at
        return min(most, len(names))

    def use(self, names: Sequence[int]) -> None:
        """Count one more request that uses these blocks; those that are not here have just been computed."""
        for name in names:
            users = self.used.get(name)
            if users is not None:
                self.used[name] = users + 1
                continue
            self.used[name] = 1
            if name in self.idle:
                del self.idle[name]
            elif name in self._removed:
                del self._removed[name]
            else:
                self._added[name] = None

    def leave(self, names: Sequence[int]) -> None:
        """Count one request less; the last block of a prompt is the first one to go."""
        for name in reversed(names):
            users = self.used[name] - 1
            if users:
                self.used[name] = users
            else:
                del self.used[name]
                self.idle[name] = None

    def evict(self, blocks: int) -> None:
        """Remove idle blocks, `blocks` of them."""
        for _ in range(blocks):
            name = next(iter(self.idle))
            del self.idle[name]
            if name in self._added:
                del self._added[name]
            else:
                self._removed[name] = None

    def changes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the blocks that came and went since the last call."""
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed
