"""Settings of a worker, and its measurements of itself."""

from __future__ import annotations

import socket

import pytest

from laps_sd.contract.ends import End
from laps_sd.service.config import ConfigError, load
from worker_svc.engine.interface import RequestRound, RoundResult
from worker_svc.metrics import ACCEPTED_AT, ACCEPTED_BY, CACHED, DRAFTED_BY, PREFILLED, TESTED_AT, observe
from worker_svc.runner.messages import Round
from worker_svc.settings import WorkerSettings
from worker_svc.vllm_arguments import arguments_of


def test_the_defaults_are_a_worker_of_the_demo_pool_on_this_host() -> None:
    settings = load(WorkerSettings, environ={})

    assert (settings.pool, settings.name, settings.engine) == ("demo", socket.gethostname(), "auto")
    assert settings.scheduler_seeds == ("127.0.0.1:50052",)


def test_settings_come_from_the_environment() -> None:
    environ = {
        "LAPS_SD_SCHEDULER_SEEDS": "a:1, b:2",
        "LAPS_SD_SLOTS": "3",
        "LAPS_SD_DETERMINISTIC": "",
        "LAPS_SD_DRAIN_S": "5",
    }
    settings = load(WorkerSettings, environ=environ)

    assert (settings.scheduler_seeds, settings.slots, settings.deterministic, settings.drain_s) == (
        ("a:1", "b:2"),
        3,
        None,
        5.0,
    )


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"scheduler_seeds": ()}, "LAPS_SD_SCHEDULER_SEEDS"),
        ({"scheduler_seeds": ("nohost",)}, "LAPS_SD_SCHEDULER_SEEDS"),
        ({"draft": "x"}, "LAPS_SD_DRAFT"),
        ({"engine": "fake", "target": "x"}, "LAPS_SD_ENGINE"),
        ({"kv_blocks": 5, "kv_memory_bytes": 5}, "LAPS_SD_KV_MEMORY_BYTES"),
        ({"kv_blocks": 2**24 + 1}, "LAPS_SD_KV_BLOCKS must be at most 16777216 blocks"),
        ({"kv_memory_bytes": 10**30}, "LAPS_SD_KV_MEMORY_BYTES must be at most 1152921504606846976 bytes"),
        ({"draft_len": 9}, "LAPS_SD_MAX_DRAFT_LEN"),
        ({"heartbeat_s": 1.1}, "LAPS_SD_HEARTBEAT_S must be at most 1.0"),
        ({"silence_s": 1.4}, "LAPS_SD_SILENCE_S must be at least 1.5"),
        ({"device": "c p u"}, "LAPS_SD_DEVICE"),
        ({"pool": ""}, "LAPS_SD_POOL"),
        ({"vllm_args": "{}"}, "LAPS_SD_VLLM_ARGS needs LAPS_SD_ENGINE=vllm, got auto"),
        ({"engine": "vllm", "vllm_args": "{"}, "LAPS_SD_VLLM_ARGS must be a JSON object: "),
        ({"engine": "vllm", "vllm_args": "[" * 9999}, "LAPS_SD_VLLM_ARGS must be a JSON object: "),
        ({"engine": "vllm", "vllm_args": "[]"}, "LAPS_SD_VLLM_ARGS must be a JSON object, such as"),
        ({"engine": "vllm", "vllm_args": '"' + "x" * 16_384}, "at most 16384 characters, got 16385"),
        (
            {"engine": "vllm", "vllm_args": '{"max_num_seqs": 4}'},
            "LAPS_SD_VLLM_ARGS must not have 'max_num_seqs': set LAPS_SD_VLLM_RESIDENTS",
        ),
        (
            {"engine": "vllm", "vllm_args": '{"enable_chunked_prefill": false}'},
            "must not have 'enable_chunked_prefill': a round may compute a part of a context",
        ),
        ({"engine": "vllm", "vllm_args": '{"speculative_config": 4}'}, "'speculative_config' that is not an"),
        ({"engine": "vllm", "vllm_args": '{"model": 4}'}, "LAPS_SD_VLLM_ARGS has a 'model'"),
        ({"engine": "vllm", "vllm_args": '{"model": "x"}', "target": "y"}, "exclude each other"),
        ({"engine": "vllm", "vllm_residents": 7}, "LAPS_SD_VLLM_RESIDENTS must be at least LAPS_SD_SLOTS"),
        ({"engine": "vllm", "deterministic": True}, "LAPS_SD_DETERMINISTIC is not for LAPS_SD_ENGINE=vllm"),
        ({"engine": "vllm", "quantization": "int8"}, "LAPS_SD_QUANTIZATION is not for LAPS_SD_ENGINE=vllm"),
        ({"quantization": "int3"}, "LAPS_SD_QUANTIZATION"),
        ({"adapters": ("sql=x",)}, "LAPS_SD_ADAPTERS needs LAPS_SD_ENGINE=vllm, got auto"),
        ({"engine": "vllm", "adapters": ("sql",)}, "must be a list of NAME=DIRECTORY, got 'sql'"),
        ({"engine": "vllm", "adapters": ("=x",)}, "names of 1 to 128 characters, got '=x'"),
        ({"engine": "vllm", "adapters": ("a=x", "a=y")}, "LAPS_SD_ADAPTERS names an adapter twice"),
        ({"engine": "vllm", "adapters": tuple(f"{n}=x" for n in range(65))}, "at most 64 adapters, got 65"),
        ({"engine": "vllm", "vllm_args": '{"enable_lora": true}'}, "'enable_lora': set LAPS_SD_ADAPTERS"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        load(WorkerSettings, values, environ={})


def test_the_engine_over_vllm_takes_models_and_arguments() -> None:
    text = '{"tensor_parallel_size": 2, "speculative_config": {"method": "mtp"}}'
    values = {"engine": "vllm", "target": "x", "vllm_args": text, "vllm_residents": 8}
    settings = load(WorkerSettings, values, environ={})

    assert arguments_of(settings.vllm_args)["tensor_parallel_size"] == 2
    assert settings.vllm_sampling == "coupled"


def test_prompt_tokens_are_counted_as_computed_or_found() -> None:
    def counted() -> tuple[float, float]:
        return tuple(next(iter(metric.collect())).samples[0].value for metric in (PREFILLED, CACHED))  # type: ignore[return-value]

    computed, found = counted()
    steps = (
        RequestRound("a", 0, (), 0, 0, prefilled=512),
        RequestRound("b", 0, (1,), 0, 0, prefilled=9, cached=64),
        RequestRound("c", 0, (1,), 0, 0, cached=32),
    )
    observe(Round(1, RoundResult(steps), [(1, step) for step in steps], [], 0.0, 0.0, 0.0, 0))
    assert counted() == (computed + 521, found + 96)


def test_draft_tokens_are_counted_by_source() -> None:
    def counted() -> list[float]:
        return [
            metric.labels(source)._value.get()
            for metric in (DRAFTED_BY, ACCEPTED_BY)
            for source in ("model", "lookup")
        ]

    before = counted()
    steps = (
        RequestRound("a", 0, (1, 2), 4, 1),
        RequestRound("b", 0, (1, 2, 3), 3, 2, looked_up=True),
        RequestRound("c", 0, (1,), 0, 0),
    )
    observe(Round(1, RoundResult(steps), [(1, step) for step in steps], [], 0.0, 0.0, 0.0, 0))
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [4, 3, 1, 2]


def test_draft_tokens_are_counted_by_position_up_to_the_first_that_is_not_accepted() -> None:
    def counted() -> list[float]:
        return [
            metric.labels(str(place))._value.get()
            for metric in (TESTED_AT, ACCEPTED_AT)
            for place in (1, 2, 3, 4)
        ]

    before = counted()
    steps = (
        RequestRound("a", 0, (1, 2), 4, 1),
        RequestRound("b", 0, (1, 2, 3), 2, 2),
        RequestRound("c", 0, (), 4, 0, finish=End.ERROR, error="no output"),
    )
    observe(Round(1, RoundResult(steps), [(1, step) for step in steps], [], 0.0, 0.0, 0.0, 0))
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [2, 2, 0, 0, 2, 1, 0, 0]
