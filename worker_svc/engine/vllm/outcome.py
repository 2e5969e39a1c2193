"""The report of one request after a step of vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.request import Request, RequestStatus

from laps_sd.contract.ends import End
from laps_vllm.pausing import Row
from worker_svc.engine.interface import PromptLogprobs, RequestRound, TokenLogprobs
from worker_svc.engine.vllm.grammars import format_problem
from worker_svc.engine.vllm.known import Known

__all__ = ["Step", "report"]

_ENDS = {
    RequestStatus.FINISHED_STOPPED: End.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: End.LENGTH,
    RequestStatus.FINISHED_REPETITION: End.STOP,
}


class Step(NamedTuple):
    """The outcome of a step for one request."""

    # None: the step did not reach it.
    row: Row | None
    # Its context was computed before the step.
    decoded: bool
    # Context tokens found in the prefix cache.
    found_cached: int
    # vLLM's log probabilities, if it made any.
    logprobs: Any
    # Those of the whole prompt, in the step that completes it, if they are wanted.
    prompt_logprobs: Any
    # vLLM counts NaN by request. With speculation it counts by row and names the wrong request.
    counts_nan: bool


def report(known: Known, request: Request, step: Step) -> RequestRound:
    """Return the report of a step, and add its tokens to the output of the request.

    `finish` is set if vLLM ended the request, or must end it now.
    """
    position = len(known.output)
    row = step.row
    if known.awaits_prompt and step.prompt_logprobs is not None:
        known.prompt_logprobs = _prompt_logprobs(known, step.prompt_logprobs)
    drafted = row.drafted if row else 0
    accepted = row.accepted if row else 0
    tokens = list(request.output_token_ids[known.taken :])
    finish = _ENDS.get(request.status, End.ERROR) if request.is_finished() else None
    problem = _problem(known, request, step, finish)
    cut_characters = 0
    if not problem and tokens and known.stop_text is not None:
        try:
            hidden = finish is End.STOP and not known.spec.include_stop_str_in_output
            found = known.stop_text.find(known.output, tokens[: len(tokens) - hidden])
        except Exception as error:  # a tokenizer that cannot decode its own tokens fails this request only
            problem, found = f"the output cannot be decoded: {error}", None
        if found is not None:
            tokens, cut_characters, finish = tokens[: found[0]], found[1], End.STOP_SEQUENCE
    of_prompt = known.prompt_logprobs if tokens and known.awaits_prompt else None
    if problem:
        of_prompt = None
        tokens, accepted, finish = [], 0, End.ERROR
    known.output += tokens
    known.taken += len(tokens)
    if known.output:
        known.prompt_logprobs = None
    return RequestRound(
        request_id=known.spec.request_id,
        position=position,
        tokens=tuple(tokens),
        drafted=drafted,
        accepted=accepted,
        prefilled=row.computed if row and not step.decoded else 0,
        cached=min(step.found_cached, len(known.spec.prompt_ids)),
        finish=finish,
        cut_characters=cut_characters,
        error=problem or None,
        logprobs=_logprobs(known, step.logprobs, len(tokens)),
        prompt_logprobs=of_prompt,
    )


def _problem(known: Known, request: Request, step: Step, finish: End | None) -> str:
    """Return the reason to end a request with an error; empty: there is none."""
    if step.row is not None and step.row.sampled and known.problem:
        return known.problem
    if step.counts_nan and request.num_nans_in_logits:
        return "the target's logits are not finite"
    if problem := format_problem(request):
        return problem
    if known.awaits_prompt and request.num_output_tokens > known.taken and known.prompt_logprobs is None:
        if len(known.spec.prompt_ids) > 1:
            return "vLLM returned no log probabilities of the whole prompt"
        known.prompt_logprobs = PromptLogprobs(known.spec.prompt_logprobs or 0)
    return "vLLM ended it with an error" if finish is End.ERROR else ""


def _prompt_logprobs(known: Known, made: Any) -> PromptLogprobs | None:
    """Return vLLM's log probabilities of a prompt; None if they are not those of the whole prompt."""
    if len(made.logprobs) != len(known.spec.prompt_ids) - 1:
        return None
    found = PromptLogprobs(made.logprobs.shape[1] - 1)  # the first column is that of the prompt's own token
    found.logprobs.extend(made.logprobs[:, 0].tolist())
    found.ranks.extend(made.selected_token_ranks.tolist())
    found.alternative_ids.extend(made.logprob_token_ids[:, 1:].flatten().tolist())
    found.alternative_logprobs.extend(made.logprobs[:, 1:].flatten().tolist())
    return found


def _logprobs(known: Known, made: Any, count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the first `count` new tokens: the coupling's, or vLLM's."""
    top = known.spec.logprobs
    if top is None or not count:
        return ()
    if made is None:
        return tuple(known.logprobs[:count])
    reports = []
    for ids, values in list(zip(made.logprob_token_ids, made.logprobs, strict=True))[:count]:
        pairs = zip(map(int, ids[1 : top + 1]), map(float, values[1 : top + 1]), strict=True)
        best = sorted((pair for pair in pairs if pair[1] > float("-inf")), key=lambda pair: -pair[1])
        reports.append(TokenLogprobs(float(values[0]), tuple(best)))
    return tuple(reports)
