"""The tokens that come out of the whole stack are those of plain decoding of the target by transformers.

Deterministic mode (fp32). A difference is allowed only from a token on at which the two best perturbed
scores, or the edge of the nucleus, lie within `MARGIN`: there two correct arithmetics may disagree. The test
counts those.
"""

from __future__ import annotations

import grpc.aio
import pytest
from tokenizers import Tokenizer

from demo.prompts import demo_prompts
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.system.calls import Outcome, seeded, stream_all
from tests.worker.plain import MARGIN, PlainDecoder, PlainText
from worker_svc.demo import TARGET_DIR
from worker_svc.engine.interface import Sampling, Specification

PROMPTS = 20  # every way to speculate meets every fifth prompt's nucleus once
MAX_TOKENS = 32
SPECULATION = [
    pb.Speculation(mode=pb.Speculation.MODE_OFF),
    pb.Speculation(max_draft_tokens=2),
    pb.Speculation(max_draft_tokens=4),
    pb.Speculation(),
]


def requests() -> list[pb.GenerateRequest]:
    """Return requests with both temperatures for every prompt; truncation for some; every way
    to speculate.
    """
    return [
        seeded(
            prompt.text,
            seed=1000 + number,
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            speculation=SPECULATION[number % len(SPECULATION)],
            **({"top_p": 0.9} if number % 5 == 0 else {"top_k": 20} if number % 7 == 0 else {}),
        )
        for number, prompt in enumerate(demo_prompts(None, PROMPTS, seed=5))
        for temperature in (0.0, 0.8)
    ]


@pytest.fixture(scope="module")
def plain(device: str) -> list[PlainText]:
    """Return the same requests, decoded one token at a time."""
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    decoder = PlainDecoder(str(TARGET_DIR), device)
    eos = frozenset({decoder.model.config.eos_token_id})
    texts = []
    for request in requests():
        sampling = request.sampling
        specification = Specification(
            request_id="plain",
            prompt_ids=tuple(tokenizer.encode(request.text).ids),
            committed_ids=(),
            sampling=Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
                top_k=sampling.top_k,
                seed=sampling.seed,
            ),
            max_tokens=MAX_TOKENS,
            stop=(),
            ignore_eos=False,
            max_draft_len=0,
        )
        texts.append(decoder.decode(specification, eos))
    return texts


def near_ties(outcomes: list[Outcome], plain: list[PlainText]) -> int:
    """Return the number of requests that differ, each from a near tie on; any other difference fails."""
    differing = 0
    for outcome, text in zip(outcomes, plain, strict=True):
        if outcome.tokens == text.tokens:
            continue
        differing += 1
        at = next(
            (i for i, (a, b) in enumerate(zip(outcome.tokens, text.tokens, strict=False)) if a != b),
            min(len(outcome.tokens), len(text.tokens)),
        )
        assert text.margins[at] < MARGIN, f"token {at} differs although the margin is {text.margins[at]:.2e}"
    return differing


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"slots": 1}, id="batch 1"),
        pytest.param({"slots": 8}, id="batch 8"),
        # Room for about three requests on the device and for two on the host: pausing means swapping, then
        # dropping.
        pytest.param(
            {
                "slots": 4,
                "context_tokens": 192,
                "environment": {
                    "LAPS_SD_KV_BLOCKS": "16",
                    "LAPS_SD_HOST_BYTES": "1000000",
                },
            },
            id="tight KV",
        ),
    ],
)
async def test_the_stack_streams_the_tokens_of_plain_decoding(
    settings: dict[str, object], plain: list[PlainText], device: str
) -> None:
    with LocalStack(engine="demo", device=device, **settings) as stack:
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            outcomes = await stream_all(inference_pb2_grpc.InferenceStub(channel), requests())

    differing = near_ties(outcomes, plain)
    assert differing <= 1, f"{differing} of {len(outcomes)} requests differ from a near tie on"
    assert sum(outcome.end.speculation.accepted for outcome in outcomes if outcome.end) > 0
