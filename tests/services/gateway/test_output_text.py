"""Which tokens of an output have text, by the parameters of its request, and which a client gets that continues it."""

from __future__ import annotations

import pytest

from gateway.calls.output import Output
from gateway.links.client_stream import Accepted, Batch
from gateway.model.files import ModelFiles
from laps_sd.service.text_parameters import text_parameters
from laps_sd.v1.gateway_link_pb2 import RequestEnd
from laps_sd.v1.inference_pb2 import Cursor, FinishReason, SamplingParams, TokenLogprobs


def text_of(model: ModelFiles, ids: list[int], **sampling: object) -> str:
    """Return the text of a whole output."""
    parameters = text_parameters(SamplingParams(**sampling))  # type: ignore[arg-type]
    accepted = Accepted("s0.a", 3, 1, (), False, "tiny", parameters)
    batch = Batch(0, ids, [], RequestEnd(kind=RequestEnd.KIND_STOP))
    return Output(accepted, model).add(batch).text


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, "hello"),
        ({"skip_special_tokens": False}, "<|user|>hello"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|user|>hello<|end|>"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "<|user|>hello<|end|>"),
        ({"include_stop_str_in_output": True}, "hello"),
    ],
)
def test_special_tokens(model: ModelFiles, sampling: dict[str, bool], text: str) -> None:
    assert text_of(model, model.encode_rendered("<|user|>hello<|end|>"), **sampling) == text


def test_a_stop_token_has_text_if_it_is_to_be_included(model: ModelFiles) -> None:
    ids = model.encode_rendered("hello.")
    assert text_of(model, ids, stop_token_ids=ids[-1:]) == "hello"
    assert text_of(model, ids, stop_token_ids=ids[-1:], include_stop_str_in_output=True) == "hello."


@pytest.mark.parametrize("included", [False, True])
def test_an_end_token_after_a_stop_string_that_does_not_count_is_no_stop_string(
    model: ModelFiles, included: bool
) -> None:
    ids = model.encode_rendered("hello<|end|>")
    sampling = SamplingParams(min_tokens=len(ids) - 1, include_stop_str_in_output=included)
    accepted = Accepted("s0.a", 3, 1, ("lo", "lot"), False, "tiny", text_parameters(sampling))
    piece = Output(accepted, model).add(Batch(0, ids, [], RequestEnd(kind=RequestEnd.KIND_STOP)))
    assert piece.end is not None
    assert (piece.text, piece.end.finish_reason) == ("hello", FinishReason.FINISH_REASON_STOP)


def test_a_client_that_continues_gets_what_is_after_its_cursor_wherever_batches_are_cut(
    model: ModelFiles,
) -> None:
    accepted = Accepted("s0.a", 3, 1, (), True, "tiny")
    ids = model.encode_rendered("hello hello hello")
    after = 3
    continued = Output(accepted, model, Cursor(next_token=after, text_offset=0))
    got: list[int] = []
    for first in range(0, len(ids), 2):
        some = range(first, min(first + 2, len(ids)))
        batch = Batch(first, [ids[at] for at in some], [TokenLogprobs(logprob=-at) for at in some])
        piece = continued.add(batch)
        assert (piece.first_token, piece.next_token) == (
            min(max(first, after), some.stop),
            max(some.stop, after),
        )
        assert [one.logprob for one in piece.logprobs] == [-at for at in some if at >= after]
        got += piece.token_ids

    assert got == ids[after:]
