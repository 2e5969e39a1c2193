"""How a request ended: each table has a word for every end, and what goes out comes back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.api import ends as other_apis
from laps_sd.contract.ends import End
from laps_sd.service import ends
from laps_sd.v1 import gateway_link_pb2, inference_pb2

Kind = gateway_link_pb2.RequestEnd.Kind
FinishReason = inference_pb2.FinishReason


@pytest.mark.parametrize(
    "table",
    [ends.KINDS, ends.FINISH_REASONS, other_apis.OPENAI, other_apis.VLLM],
    ids=lambda table: len(table),
)
def test_every_end_has_a_word(table: Mapping[End, object]) -> None:
    assert set(End) <= set(table)


def test_every_kind_of_the_links_is_one_end() -> None:
    assert set(ends.KINDS.values()) == set(Kind.values())
    for end in End:
        assert ends.end_of_kind(ends.KINDS[end]) is end
        assert Kind.Name(ends.KINDS[end]) == f"KIND_{end.name}"


def test_every_public_reason_is_one_end() -> None:
    assert set(ends.FINISH_REASONS.values()) == set(FinishReason.values())
    for end in set(End) - {End.DEADLINE}:
        assert ends.end_of_reason(ends.FINISH_REASONS[end]) is end
        assert FinishReason.Name(ends.FINISH_REASONS[end]) == f"FINISH_REASON_{end.name}"


def test_a_deadline_is_an_error_in_public() -> None:
    assert ends.end_of_reason(ends.FINISH_REASONS[End.DEADLINE]) is End.ERROR


def test_a_reason_reads_as_the_value_of_its_end() -> None:
    for end in set(End) - {End.DEADLINE}:
        assert ends.reason_text(ends.FINISH_REASONS[end]) == end.value


def test_an_end_of_a_later_version_is_unknown() -> None:
    kind: Kind.ValueType = 99  # type: ignore[assignment]
    reason: FinishReason.ValueType = 99  # type: ignore[assignment]
    assert (ends.end_of_kind(kind), ends.end_of_reason(reason)) == (None, None)
    assert ends.reason_text(reason) == "unspecified"
    assert ends.reason_text(FinishReason.FINISH_REASON_UNSPECIFIED) == "unspecified"


def test_what_is_no_success_for_openai_is_no_success_for_vllm_either() -> None:
    """Except a cancellation, which vLLM counts."""
    for end in set(End) - {End.CANCELLED}:
        assert other_apis.VLLM[end] == other_apis.OPENAI[end]
