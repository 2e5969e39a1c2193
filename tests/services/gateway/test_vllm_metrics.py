"""Metrics for dashboards, autoscalers and endpoint pickers made for vLLM, as a gateway exports them."""

from __future__ import annotations

import asyncio
import math
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.vllm_metrics import SAME
from laps_sd.service.metrics import REGISTRY
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import GenerateRequest, SpeculationSummary, Timing
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import rest

LABELS = {"model_name": "tiny", "engine": "0"}
READ_BY_OTHERS = {
    # The endpoint picker of the Gateway API inference extension, and llm-d's.
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    # vLLM's own dashboards for Grafana, current and previous.
    "vllm:gpu_cache_usage_perc",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
}


async def scrape(running: Running) -> dict[str, float]:
    """Return the samples with vLLM's names at the HTTP port; of samples with further labels, the last."""
    assert running.gateway.http is not None
    url = f"http://127.0.0.1:{running.gateway.http.port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    ]
    assert all(sample.labels.items() >= LABELS.items() for sample in samples)
    found = {sample.name: sample.value for sample in samples}
    return found | {
        f"success {sample.labels['finished_reason']}": sample.value
        for sample in samples
        if sample.name == "vllm:request_success_total"
    }


async def test_every_name_that_others_read_is_there_before_the_first_request(
    scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running = await start_gateway(scheduler.address, http_port=0, vllm_metrics=True)

    assert set(await scrape(running)) >= READ_BY_OTHERS


async def test_they_tell_what_runs_what_waits_and_what_has_ended(
    scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running = await start_gateway(scheduler.address, http_port=0, vllm_metrics=True)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    before = await scrape(running)
    calls, ids = [], []
    for number in range(1, 4):
        calls.append(running.stub.GenerateStream(GenerateRequest(text="hello there")))
        ids.append(await scheduler.submitted(number))
    first, second, _ = ids

    async def counts(running_now: int, waiting: int) -> dict[str, float]:
        async def there() -> dict[str, float]:
            now = await scrape(running)
            shown = now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]
            return now if shown == (running_now, waiting) else {}

        return await wait_until_async(there, description=f"{running_now} running, {waiting} waiting")

    await counts(0, 3)
    scheduler.commit(first, [70, 71])
    await counts(1, 2)
    end = link_pb2.RequestEnd(
        kind=Kind.KIND_STOP_SEQUENCE,
        speculation=SpeculationSummary(rounds=3, drafts=2, drafted=8, accepted=6),
        timing=Timing(queued_s=0.001, first_token_s=0.75, total_s=2.0, preemptions=1),
    )
    scheduler.commit(second, [70, 71, 72], end)
    await rest(calls[1])
    after = await counts(1, 1)

    grown = {name: after[name] - before[name] for name in after}
    assert grown["success stop"] == 1
    assert grown["success length"] == grown["success abort"] == 0
    assert grown["vllm:spec_decode_num_drafts_total"] == 2
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == 8
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == 6
    assert grown["vllm:num_preemptions_total"] == 1
    assert grown["vllm:generation_tokens_total"] == 3
    assert grown["vllm:request_generation_tokens_sum"] == 3
    assert grown["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.001)
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] > 0

    scheduler.load = link_pb2.ShardLoad(workers=2, kv_usage=0.25)

    async def usage() -> bool:
        now = await scrape(running)
        return now["vllm:kv_cache_usage_perc"] == now["vllm:gpu_cache_usage_perc"] == 0.25

    await wait_until_async(usage, description="what the leader said is told")


@pytest.mark.parametrize("queued_s", [math.nan, -1e300, 1e300])
async def test_no_wait_is_longer_than_the_request_took(
    queued_s: float, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running = await start_gateway(scheduler.address, http_port=0, vllm_metrics=True)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    before = await scrape(running)
    call = running.stub.GenerateStream(GenerateRequest(text="hello there"))
    end = link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, timing=Timing(queued_s=queued_s))
    scheduler.commit(await scheduler.submitted(1), [70], end)
    await rest(call)
    after = await scrape(running)

    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:request_queue_time_seconds_count"] == 1
    queued, took = "vllm:request_queue_time_seconds_sum", "vllm:e2e_request_latency_seconds_sum"
    assert 0 <= grown[queued] <= grown[took] + 1e-9


async def test_without_the_setting_there_are_none(
    scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running = await start_gateway(scheduler.address, http_port=0)

    assert await scrape(running) == {}


async def test_a_gateway_that_stops_takes_them_away(
    scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running = await start_gateway(scheduler.address, vllm_metrics=True)
    assert any(family.name in SAME for family in REGISTRY.collect())

    await running.gateway.stop()

    assert not any(family.name in SAME for family in REGISTRY.collect())
