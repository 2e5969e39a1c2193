"""The largest request that a gateway accepts is accepted by the scheduler and by the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.calls.completion import complete
from gateway.calls.validation import check_request
from gateway.model.files import ModelFiles
from gateway.settings import GatewaySettings
from laps_sd.contract import limits
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1.gateway_link_pb2 import Specification, Submit
from scheduler_svc.wire.checks import check_submission
from worker_svc.engine.interface import Capacity, check_specification
from worker_svc.link.wire import specification

VOCABULARY, CONTEXT = 5000, 256
MODEL = cast(
    ModelFiles,
    SimpleNamespace(
        name="tiny",
        template=None,
        context_tokens=CONTEXT,
        vocab_size=VOCABULARY,
        recommended=pb.SamplingParams(),
        adapter_of=lambda _: "",
        encode_rendered=lambda text: [*[len(text)] * (limits.MAX_BAD_WORD_TOKENS - 1), int(text)],
    ),
)
LARGEST = pb.GenerateRequest(
    text="x",
    sampling=pb.SamplingParams(
        temperature=limits.MAX_TEMPERATURE,
        repetition_penalty=limits.MAX_REPETITION_PENALTY,
        presence_penalty=limits.MAX_PENALTY,
        frequency_penalty=-limits.MAX_PENALTY,
        logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIAS), -limits.MAX_BIAS),
        seed=limits.MAX_SEED,
        stop_token_ids=range(limits.MAX_STOP_TOKENS),
        allowed_token_ids=range(limits.MAX_ALLOWED_TOKENS),
        bad_words=[
            str(number).zfill(limits.MAX_BAD_WORD_CHARACTERS) for number in range(limits.MAX_BAD_WORDS)
        ],
        bad_words_ids=[
            pb.TokenIds(ids=[number] * limits.MAX_BAD_WORD_TOKENS)
            for number in range(limits.MAX_BAD_WORDS_IDS - 2 * limits.MAX_BAD_WORDS)
        ],
        stop=["🦊" * limits.MAX_STOP_CHARACTERS] * limits.MAX_STOP_STRINGS,
    ),
    output_format=pb.OutputFormat(regex="🦊" * limits.MAX_FORMAT_CHARACTERS),
    logprobs=limits.MAX_LOGPROBS,
    prompt_logprobs=limits.MAX_LOGPROBS,
)
"""With characters of four bytes in UTF-8."""


def submission() -> Submit:
    settings = GatewaySettings(model="tiny", max_logprobs=limits.MAX_LOGPROBS)
    check_request(LARGEST, settings, MODEL)
    submit = complete(LARGEST, [1], settings=settings, model=MODEL, tenant="t", fallback_seed=0)
    submit.request_id = submit.specification.request_id = "s.r"
    return submit


def test_the_scheduler_accepts_the_largest_request_of_a_gateway() -> None:
    check_submission(submission(), CONTEXT)


def test_the_engine_accepts_the_largest_request_of_a_gateway() -> None:
    check_specification(
        specification(submission().specification),
        Capacity(
            slots=1,
            target_blocks=64,
            draft_blocks=0,
            block_size=16,
            max_length=CONTEXT,
            max_draft_len=4,
            vocab_size=VOCABULARY,
            device="fake",
        ),
    )


def set_stop(wire: Specification, count: int) -> None:
    wire.sampling.stop[:] = ["x"] * count


def set_logit_bias(wire: Specification, count: int) -> None:
    wire.sampling.logit_bias.clear()
    wire.sampling.logit_bias.update(dict.fromkeys(range(count), 1.0))


def set_stop_tokens(wire: Specification, count: int) -> None:
    wire.sampling.stop_token_ids[:] = [1] * count


def set_allowed(wire: Specification, count: int) -> None:
    wire.sampling.allowed_token_ids[:] = [1] * count


def set_bad_words(wire: Specification, count: int) -> None:
    del wire.sampling.bad_words_ids[:]
    wire.sampling.bad_words_ids.extend([pb.TokenIds(ids=[1])] * count)


def set_bad_word(wire: Specification, count: int) -> None:
    del wire.sampling.bad_words_ids[:]
    wire.sampling.bad_words_ids.add(ids=[1] * count)


def set_logprobs(wire: Specification, count: int) -> None:
    wire.logprobs = count


def set_format(wire: Specification, count: int) -> None:
    """The message has a tag and three bytes of length in addition to the text."""
    wire.output_format.regex = "x" * (count - 4)


@pytest.mark.parametrize(
    ("set_to", "most", "field"),
    [
        (set_stop, 64, "sampling.stop"),
        (set_logit_bias, 4096, "sampling.logit_bias"),
        (set_stop_tokens, 256, "sampling.stop_token_ids"),
        (set_allowed, 4096, "sampling.allowed_token_ids"),
        (set_bad_words, 1536, "sampling.bad_words_ids"),
        (set_bad_word, 256, "sampling.bad_words_ids"),
        (set_logprobs, 256, "logprobs"),
        (set_format, 512 * 1024, "output_format"),
    ],
)
def test_the_scheduler_accepts_more_but_not_anything(
    set_to: Callable[[Specification, int], Any], most: int, field: str
) -> None:
    submit = submission()
    set_to(submit.specification, most)
    check_submission(submit, CONTEXT)
    set_to(submit.specification, most + 1)
    with pytest.raises(InvalidArgument) as refusal:
        check_submission(submit, CONTEXT)
    assert f"specification.{field}" in str(refusal.value)
