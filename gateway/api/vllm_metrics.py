"""The metrics of a gateway under vLLM's names: for dashboards, autoscalers and endpoint pickers that read
those.

A vLLM server is front end and engine in one process; here clients call the gateway, so all names are found at
a gateway. Nothing is counted twice: the metrics below are computed from the gateway's own metrics at each
scrape. All have vLLM's labels `model_name` and `engine` ("0").

* Running and waiting are this gateway's requests, so that a sum over gateways is the total: waiting means
  that no output has arrived.
* KV usage is that of all workers, from the leaders' latest reports.
* Values known only at the end of a request (waits, speculation, preemptions) are counted then.
* Times between tokens are the mean of a request: one observation per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gateway import metrics
from gateway.api.ends import VLLM
from gateway.calls.stream_metrics import CLIENT_DISCONNECTED
from gateway.links.shards import Shards

__all__ = ["SAME", "VllmMetrics"]

SAME: dict[str, MetricWrapperBase] = {
    "vllm:time_to_first_token_seconds": metrics.FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": metrics.TOKEN_TIME,
    "vllm:time_per_output_token_seconds": metrics.TOKEN_TIME,
    "vllm:request_time_per_output_token_seconds": metrics.TOKEN_TIME,
    "vllm:e2e_request_latency_seconds": metrics.REQUEST,
    "vllm:request_queue_time_seconds": metrics.QUEUE_WAIT,
    "vllm:request_prompt_tokens": metrics.PROMPT_TOKENS,
    "vllm:request_generation_tokens": metrics.REQUEST_OUTPUT,
    "vllm:generation_tokens": metrics.OUTPUT_TOKENS,
    "vllm:num_preemptions": metrics.PREEMPTIONS,
    "vllm:spec_decode_num_drafts": metrics.DRAFTS,
    "vllm:spec_decode_num_draft_tokens": metrics.DRAFTED,
    "vllm:spec_decode_num_accepted_tokens": metrics.ACCEPTED,
}
"""Our metrics with the same meaning, by the name of vLLM's metric, without the `_total` of a counter."""
FINISHED = {end.value: reason for end, reason in VLLM.items() if reason is not None} | {
    CLIENT_DISCONNECTED: "abort"
}
"""vLLM's reason by our metric's label of an end. Other labels are errors, and not successes."""


class VllmMetrics(Collector):
    """A collector of metrics. Register it where metrics are collected."""

    def __init__(self, model: str, shards: Shards) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._shards = shards

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics with their present values."""
        for name, metric in SAME.items():
            yield from self._renamed(name, metric)
        yield self._prompt_tokens()
        yield self._success()
        yield from self._gauges()

    def _renamed(self, name: str, metric: MetricWrapperBase) -> Iterator[Metric]:
        for family in metric.collect():
            renamed = Metric(name, f"{family.documentation} As {family.name}.", family.type)
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                end = sample.name.removeprefix(family.name)
                renamed.add_sample(name + end, {**sample.labels, **self._labels}, sample.value)
            yield renamed

    def _prompt_tokens(self) -> Metric:
        family = Metric("vllm:prompt_tokens", "Prompt tokens of accepted requests.", "counter")
        samples = next(iter(metrics.PROMPT_TOKENS.collect())).samples
        total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
        family.add_sample("vllm:prompt_tokens_total", self._labels, total)
        return family

    def _success(self) -> Metric:
        family = Metric("vllm:request_success", "Requests that ended, by reason.", "counter")
        ends = dict.fromkeys(FINISHED.values(), 0.0)
        for sample in next(iter(metrics.REQUESTS.collect())).samples:
            reason = FINISHED.get(sample.labels["end"])
            if reason is not None and sample.name.endswith("_total"):
                ends[reason] += sample.value
        for reason, count in ends.items():
            labels = {**self._labels, "finished_reason": reason}
            family.add_sample("vllm:request_success_total", labels, count)
        return family

    def _gauges(self) -> Iterator[Metric]:
        links = list(self._shards.links.values())
        streams = [stream for link in links for stream in link.streams if not stream.over]
        waiting = sum(stream.next_token == 0 for stream in streams)
        workers = sum(link.load.workers for link in links if link.load is not None)
        used = sum(link.load.kv_usage * link.load.workers for link in links if link.load is not None)
        usage = used / workers if workers else 0.0
        for name, meaning, value in (
            ("num_requests_running", "Requests of this gateway that have output.", len(streams) - waiting),
            ("num_requests_waiting", "Requests of this gateway that have no output yet.", waiting),
            ("kv_cache_usage_perc", "Share of the workers' KV blocks in use; 1 is all.", usage),
            ("gpu_cache_usage_perc", "As vllm:kv_cache_usage_perc, which was called so before.", usage),
        ):
            family = Metric(f"vllm:{name}", meaning, "gauge")
            family.add_sample(f"vllm:{name}", self._labels, float(value))
            yield family
