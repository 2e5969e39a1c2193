"""Output lengths predicted from the words of prompts: over the real links, across leaders, and switched off."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import grpc.aio
import pytest

from laps_sd.contract.length_features import FEATURES, MOST_FEATURES, FeatureHash, packed
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from tests.helpers import wait_until_async
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, gateway, worker

STOP = gateway_pb.RequestEnd.KIND_STOP
SHORT, LONG = 4, 200
"""Tokens of the answers to the two kinds of prompts."""
WAVES, TOGETHER = 6, 10
"""Requests that are learned from before the next ones arrive."""
MOST = 500


def words(text: str) -> list[int]:
    return FeatureHash().features_of(text)


SHORT_PROMPT, LONG_PROMPT = words("zib dam quarrel"), words("lunt vorpal orchard")


async def teach(scheduler: SchedulerUnderTest) -> None:
    """Run requests of both kinds to their own ends, some at a time."""
    async with (
        gateway(scheduler.address) as client,
        worker(scheduler.address, slots=TOGETHER, target_blocks=10_000, draft_blocks=10_000) as gpu,
    ):
        for wave in range(WAVES):
            lengths = {f"r{wave}-{number}": (SHORT, LONG)[number % 2] for number in range(TOGETHER)}
            for number, (name, length) in enumerate(lengths.items()):
                features = SHORT_PROMPT if length == SHORT else LONG_PROMPT
                await client.submit(name, submission_id=number, max_tokens=MOST, length_features=features)
            listed = await gpu.assigned(*lengths)
            reports = [
                gpu.report(name, listed[name].lease_epoch, 0, [7] * length, end=STOP)
                for name, length in lengths.items()
            ]
            await gpu.send_reports(*reports)
            await gpu.acknowledged(reports[-1].number)


async def predicted(scheduler: SchedulerUnderTest, request_id: str) -> int | None:
    """Return the length that Explain says was predicted from the prompt; None if it names no such
    prediction."""
    asked = admin_pb.AdminExplainRequest(request_id=request_id, tenant="anonymous")
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        told = await admin_pb2_grpc.AdminStub(channel).ExplainRequest(asked)
    found = re.search(r"a prediction of (\d+) tokens from the words of its prompt", told.explanation.basis)
    assert found or "prompt" not in told.explanation.basis
    return int(found[1]) if found else None


async def learned(scheduler: SchedulerUnderTest) -> float:
    """Return the number of requests that the predictor on the record has learned from."""
    blob = await scheduler.store.load_priors()
    return float(json.loads(blob)["prompts"]["learned"]) if blob else 0.0


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (range(MOST_FEATURES + 1), f"must be at most {MOST_FEATURES} features, got {MOST_FEATURES + 1}"),
        ([5, 4], "got 4 after 5"),
        ([5, 5], "got 5 after 5"),
        ([FEATURES], f"must ascend and be below {FEATURES}"),
        ([2**32 - 1], f"must ascend and be below {FEATURES}"),
    ],
    ids=["too many", "not ascending", "twice", "too large", "largest"],
)
async def test_features_that_no_gateway_sends_are_refused_by_name(
    scheduler: SchedulerUnderTest, features: Sequence[int], said: str
) -> None:
    async with gateway(scheduler.address) as client:
        refused = (await client.submit("r1", length_features=features)).refused
        accepted = (await client.submit("r2", submission_id=2, length_features=range(MOST_FEATURES))).accepted

        assert refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
        assert refused.detail.startswith("length_features")
        assert said in refused.detail
        assert accepted.request_id == "r2"
        assert await scheduler.store.unfinished_ids() == ["r2"]


async def test_the_length_of_an_answer_is_learned_from_the_words_of_prompts_and_every_leader_knows_it(
    start: StartScheduler,
) -> None:
    settings = {"policy": "laps-sd", "priors_save_s": 0.1, "reattach_grace_s": 60.0}
    first = await start(**settings)
    await teach(first)
    async with gateway(first.address) as client:
        await client.submit("short", submission_id=1, max_tokens=MOST, length_features=SHORT_PROMPT)
        await client.submit("long", submission_id=2, max_tokens=MOST, length_features=LONG_PROMPT)
        await client.submit("silent", submission_id=3, max_tokens=MOST)
        short, long = await predicted(first, "short"), await predicted(first, "long")

        assert short is not None and long is not None
        assert short < 4 * SHORT < LONG / 4 < long
        assert await predicted(first, "silent") is None, "nothing is known of its prompt"

        async def is_saved() -> bool:
            return await learned(first) == WAVES * TOGETHER

        await wait_until_async(is_saved, description="what was learned is on the record")
        await first.crash()
    second = await start(**settings)
    async with gateway(second.address) as client:
        await client.submit("short-again", submission_id=1, max_tokens=MOST, length_features=SHORT_PROMPT)
        await client.submit("long-again", submission_id=2, max_tokens=MOST, length_features=LONG_PROMPT)

        # A record keeps a weight in a byte, and the weights of up to 2 % of the requests less.
        for before, names in ((short, ("short", "short-again")), (long, ("long", "long-again"))):
            for name in names:
                assert await predicted(second, name) == pytest.approx(before, rel=0.2, abs=1), name


async def test_switched_off_nothing_of_a_prompt_is_kept_or_used(start: StartScheduler) -> None:
    settings = {"policy": "laps-sd", "priors_save_s": 0.1, "reattach_grace_s": 60.0}
    scheduler = await start(predict_lengths=False, **settings)
    await teach(scheduler)
    async with gateway(scheduler.address) as client:
        await client.submit("short", max_tokens=MOST, length_features=SHORT_PROMPT)
        stored = await scheduler.store.read("short")

        assert stored is not None
        assert stored.length_features == b""
        assert await predicted(scheduler, "short") is None
    await wait_until_async(scheduler.store.load_priors, description="what was learned is on the record")
    assert await learned(scheduler) == 0


async def test_switched_off_what_an_earlier_leader_has_kept_is_not_used(start: StartScheduler) -> None:
    settings = {"policy": "laps-sd", "reattach_grace_s": 60.0}
    first = await start(**settings)
    async with gateway(first.address) as client:
        await client.submit("r1", max_tokens=MOST, length_features=SHORT_PROMPT)
        stored = await first.store.read("r1")
        assert stored is not None
        assert stored.length_features == packed(SHORT_PROMPT)
        assert await predicted(first, "r1") is not None, "by the start weights"
        await first.crash()
    second = await start(predict_lengths=False, **settings)
    assert await predicted(second, "r1") is None
