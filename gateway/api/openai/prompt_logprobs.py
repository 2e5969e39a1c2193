"""Log probabilities of a prompt in JSON: vLLM's `prompt_logprobs`, and the beginning of a completion's `logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gateway.api.openai.body import Json
from laps_sd.v1.inference_pb2 import PromptLogprobs

__all__ = ["beginning_of_logprobs", "vllm_json"]

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have, as in vLLM."""

Alternatives = Sequence[tuple[int, float]]
"""Token ids with their log probabilities, best first."""


def vllm_json(
    found: PromptLogprobs, prompt: Sequence[int], most: int, text_of: Callable[[int], str]
) -> list[Json | None]:
    """Return an entry for each token of the prompt, with at most `most` alternatives; the first is null."""
    entries: list[Json | None] = [None]
    for token, logprob, rank, alternatives in _rows(found, prompt, most):
        entry = {str(token): _logprob_json(logprob, rank, text_of(token))}
        for place, (other, its_logprob) in enumerate(alternatives, 1):
            entry.setdefault(str(other), _logprob_json(its_logprob, place, text_of(other)))
        entries.append(entry)
    return entries


def beginning_of_logprobs(
    found: PromptLogprobs, prompt: Sequence[int], most: int, name_of: Callable[[int], str]
) -> Json:
    """Return `tokens`, `token_logprobs` and `top_logprobs` of the prompt, with nulls for its first token.

    `top_logprobs` has each token itself too, where it is none of the most probable ones.
    """
    top: list[Json | None] = [None]
    for token, its_own, _, alternatives in _rows(found, prompt, most):
        names: Json = {}
        for other, logprob in (*alternatives, (token, its_own)):
            names.setdefault(name_of(other), logprob)
        top.append(names)
    return {
        "tokens": [name_of(token) for token in prompt],
        "token_logprobs": [None, *(max(one, LEAST_LOGPROB) for one in found.logprobs)],
        "top_logprobs": top,
    }


def _rows(
    found: PromptLogprobs, prompt: Sequence[int], most: int
) -> Iterator[tuple[int, float, int, Alternatives]]:
    """Yield token, log probability, rank and alternatives of each token but the first."""
    count = found.alternatives
    ids, logprobs = found.alternative_ids[:], [max(one, LEAST_LOGPROB) for one in found.alternative_logprobs]
    rows = zip(prompt[1:], found.logprobs[:], found.ranks[:], strict=True)
    for at, (token, logprob, rank) in enumerate(rows):
        own = slice(at * count, at * count + min(count, most))
        yield token, max(logprob, LEAST_LOGPROB), rank, list(zip(ids[own], logprobs[own], strict=True))


def _logprob_json(logprob: float, rank: int, text: str) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
