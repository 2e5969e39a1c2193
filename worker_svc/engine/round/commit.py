"""Last phase of the round: accepted draft tokens and the target's next one become output."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from laps_sd.contract.acceptance import accepted_of, tested_of
from laps_sd.contract.ends import End
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.outlook import OutputLengths
from worker_svc.engine.interface import RequestRound
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.round.prefill import Prefill
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sampling.stopping import Cut, cut


class Commit:
    """Changes requests by the outcome of verification: tokens, lengths, acceptance, and the end, if any."""

    def __init__(self, pair: ModelPair, prefill: Prefill, output_lengths: OutputLengths) -> None:
        self._pair = pair
        self._prefill = prefill
        self._output_lengths = output_lengths

    def commit(self, request: RoundRequest, lengths: DraftLengths) -> RequestRound:
        """Commit the outcome for one request, and return its report."""
        sequence = request.sequence
        position = sequence.output_length
        # In the report of the first round after the context was found.
        cached = min(sequence.reused, len(sequence.spec.prompt_ids))
        sequence.reused = 0
        accepted = accepted_of(request.draft_tokens, request.chosen)
        block = request.chosen[: accepted + 1]
        end = Cut(0, None)
        if request.problem is None and block:
            end = self._end(request, position, block)
        if request.problem is not None:
            return self._fail(request, position, cached)
        if request.chunk:
            sequence.target.length += request.chunk
        if request.prompt_logprobs is not None and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.extend(request.prompt_logprobs)
        if not block:
            self._prefill.remember(sequence)
            return RequestRound(
                sequence.spec.request_id, position, (), 0, 0, prefilled=request.chunk, cached=cached
            )
        del block[end.tokens :]
        drafted = len(request.draft_tokens)
        sequence.tokens.extend(block)
        sequence.target.length = len(sequence.tokens) - 1
        if drafted and request.catch_up and sequence.draft is not None:
            # The draft was fed the last token and all draft tokens but the last; the accepted ones are
            # context now.
            sequence.draft.length = request.context + min(accepted, drafted - 1)
        self._prefill.remember(sequence)
        if sequence.format is not None:
            sequence.format.follow(block)
        if request.found is not None:
            lengths.found.observe(sequence.found, request.found, block)
        if not request.chunk and (request.catch_up or not drafted):
            lengths.observe_acceptance(sequence.acceptance, accepted, tested_of(accepted, drafted))
        of_prompt, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if end.finish is not None:
            sequence.finished = True
            self._pair.release(sequence)
            self._output_lengths.observe(sequence.output_length)
        return RequestRound(
            request_id=sequence.spec.request_id,
            position=position,
            tokens=tuple(block),
            drafted=drafted,
            accepted=accepted,
            prefilled=request.chunk,
            cached=cached,
            finish=end.finish,
            cut_characters=end.cut_characters,
            logprobs=tuple(request.logprobs[: end.tokens]),
            looked_up=drafted > 0 and not request.catch_up,
            prompt_logprobs=of_prompt,
        )

    def _end(self, request: RoundRequest, position: int, block: SequenceOf[int]) -> Cut:
        """Return the part of the block that counts; note a problem if the output cannot be decoded."""
        sequence = request.sequence
        output = sequence.output if sequence.stop_text else ()
        try:
            return cut(sequence.spec, position, block, self._pair.eos_ids, sequence.stop_text, output)
        except Exception as error:
            # A tokenizer that cannot decode its own tokens fails this request only.
            request.problem = f"the output cannot be decoded: {error}"
            return Cut(0, None)

    def _fail(self, request: RoundRequest, position: int, cached: int) -> RequestRound:
        """End a request with an error."""
        self._pair.release(request.sequence)
        request.sequence.finished = True
        return RequestRound(
            request.sequence.spec.request_id,
            position,
            (),
            len(request.draft_tokens),
            0,
            prefilled=request.chunk,
            cached=cached,
            finish=End.ERROR,
            error=request.problem,
        )
