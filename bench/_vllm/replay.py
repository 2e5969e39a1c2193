"""A model runner that repeats recorded texts: what vLLM's executor returns, without a model.

A greedy request emits the same tokens in the same groups whenever it runs, so the steps of a replay are those
of the engine. After an eviction, the first step has no draft tokens; from there on the groups are those of the
recording, up to its next boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, NamedTuple

from bench._vllm.in_core import model_output


class Recorded(NamedTuple):
    """What a request emitted."""

    text: Sequence[int]
    groups: Sequence[int]
    """Tokens of each of its steps that emitted any."""


def next_tokens(recorded: Recorded, ends: Sequence[int], position: int, drafts: int) -> list[int]:
    """Return the tokens of a step from `position`: one without drafts, else those up to the next of the ends of the
    groups, `ends`.
    """
    if not drafts:
        return list(recorded.text[position : position + 1])
    end = next((end for end in ends if end > position), len(recorded.text))
    return list(recorded.text[position : min(end, position + drafts + 1)])


class ReplayExecutor:
    """Stands in for vLLM's executor in `EngineCore.step`."""

    def __init__(self, scheduler: Any, recorded: Mapping[str, Recorded], draft_len: int) -> None:
        self._scheduler = scheduler
        self._recorded = recorded
        self._ends = {name: list(accumulate(each.groups)) for name, each in recorded.items()}
        self._draft_len = draft_len
        self._drafts: Any = None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Return a finished future of what a model runner returns for this step."""
        from vllm.v1.outputs import DraftTokenIds

        names = list(output.num_scheduled_tokens)
        sampled = [self._sampled(name, output) for name in names]
        self._drafts = DraftTokenIds(names, [[0] * self._draft_len if tokens else [] for tokens in sampled])
        done: Future[Any] = Future()
        done.set_result(model_output(names, sampled))
        return done

    def take_draft_token_ids(self) -> Any:
        """Return the draft tokens of the last step: their values do not matter."""
        return self._drafts

    def _sampled(self, name: str, output: Any) -> list[int]:
        request = self._scheduler.requests.get(name)
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if request is None or request.is_finished() or request.is_prefill_chunk:
            return []
        return next_tokens(self._recorded[name], self._ends[name], request.num_output_tokens, drafts)
