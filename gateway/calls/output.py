"""Conversion of the received output to what a client gets, whatever its protocol. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.links.client_stream import Accepted, Batch
from gateway.model.detokenizer import Detokenizer
from gateway.model.files import ModelFiles
from laps_sd.contract.ends import End
from laps_sd.errors import DeadlineExceeded
from laps_sd.service.ends import FINISH_REASONS, end_of_kind
from laps_sd.service.text_parameters import skips_special_tokens
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

__all__ = ["Output", "Piece", "accepted_event", "silent_ids"]


@dataclass(slots=True)
class Piece:
    """New text and tokens of one output, and its end if it has ended. Positions are those of the whole output."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[inference_pb2.TokenLogprobs]
    first_token: int
    next_token: int
    """With `text_offset`, the cursor after this piece."""
    text_offset: int
    """Characters."""
    end: inference_pb2.Ended | None
    stop: str = ""
    """The stop string that ended the output."""
    prompt_logprobs: inference_pb2.PromptLogprobs | None = None
    """With the first token, if they were requested."""


def accepted_event(acceptance: Accepted, model: ModelFiles) -> inference_pb2.Accepted:
    """Return the first message of a stream."""
    return inference_pb2.Accepted(
        request_id=acceptance.request_id,
        model=acceptance.model or model.name,
        prompt_tokens=acceptance.prompt_tokens,
        seed=acceptance.seed,
        attached=acceptance.attached,
    )


class Output:
    """The output of one attachment after a cursor. Feed it every batch from token 0 on: decoding needs the
    beginning of the text."""

    def __init__(
        self,
        acceptance: Accepted,
        model: ModelFiles,
        cursor: inference_pb2.Cursor | None = None,
        *,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that have text."""
        self._acceptance = acceptance
        self._start_token = cursor.next_token if cursor is not None else 0
        text = acceptance.text or inference_pb2.SamplingParams()
        self._text = Detokenizer(
            model.decode,
            stop=acceptance.stop,
            min_tokens=text.min_tokens,
            included=text.include_stop_str_in_output,
            silent_ids=silent_ids(text, model) - shown_ids,
            joins=model.token_bytes.joins,
            start_offset=cursor.text_offset if cursor is not None else 0,
        )
        self.tokens = 0  # of the whole output so far

    def add(self, batch: Batch) -> Piece:
        """Add what arrived, and return what is new to the client. Raises DeadlineExceeded for an end by the
        hard deadline."""
        text = self._text.feed(batch.token_ids)
        if batch.end is not None and end_of_kind(batch.end.kind) is not End.DEADLINE:
            text += self._text.finish(batch.end.cut_characters)
        count = len(batch.token_ids)
        self.tokens = batch.first_token + count
        known = min(max(0, self._start_token - batch.first_token), count)
        return Piece(
            text,
            batch.token_ids[known:] if known else batch.token_ids,
            batch.logprobs[known:] if known else batch.logprobs,
            batch.first_token + known,
            max(self.tokens, self._start_token),
            self._text.text_offset,
            None if batch.end is None else self._ended(batch.end),
            self._text.stopped_by if batch.end is not None else "",
            None if known else batch.prompt_logprobs,
        )

    def _ended(self, end: link_pb2.RequestEnd) -> inference_pb2.Ended:
        how = end_of_kind(end.kind) or End.ERROR
        if how is End.STOP and self._text.stopped_by:
            how = End.STOP_SEQUENCE  # a token of markup, see `complete`
        if how is End.DEADLINE:
            raise DeadlineExceeded(end.detail or "the deadline of the request passed")
        error = ""
        if how is End.ERROR:
            error = end.detail or "the request failed"
        elif how is End.CANCELLED:
            error = end.detail
        return inference_pb2.Ended(
            finish_reason=FINISH_REASONS[how],
            error=error,
            usage=inference_pb2.Usage(
                prompt_tokens=self._acceptance.prompt_tokens,
                completion_tokens=self.tokens,
                cached_prompt_tokens=end.cached_prompt_tokens,
            ),
            speculation=end.speculation if end.HasField("speculation") else None,
            timing=end.timing if end.HasField("timing") else None,
            request_id=self._acceptance.request_id,
        )


def silent_ids(sampling: inference_pb2.SamplingParams, model: ModelFiles) -> frozenset[int]:
    """Return the tokens that have no text in the output of a request: special ones, unless they are wanted, and
    those that end it, unless they are to be included."""
    skipped = model.silent_ids if skips_special_tokens(sampling) else frozenset()
    if sampling.include_stop_str_in_output:
        return skipped
    ends = frozenset(sampling.stop_token_ids)
    return skipped | ends if sampling.ignore_eos else skipped | ends | model.eos_ids
