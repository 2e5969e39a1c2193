"""The engine as it is on a GPU, where vLLM's second model runner runs: vLLM's real scheduler over a virtual runner.

Where a request's output begins the runner knows only from what the scheduler sends. So a text is right only if
committed tokens reach the runner as output.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tests.vllm.one_core import mixed
from tests.vllm.virtual_second_runner import PLACES, second_runner_engine, token_of
from tests.worker.drive import Between, everybody, finish_all, rotate
from worker_svc.engine.interface import Specification
from worker_svc.engine.vllm.fingerprint import fingerprint
from worker_svc.engine.vllm.parameters import TokenChooser


def expected(specs: list[Specification]) -> dict[str, list[int]]:
    return {
        one.request_id: [token_of(one.sampling.seed, at) for at in range(one.max_tokens)] for one in specs
    }


@pytest.mark.parametrize("between", [everybody, rotate("keep"), rotate("evict")])
def test_the_text_is_that_of_its_positions(between: Between) -> None:
    specs = mixed(PLACES)
    texts, _, reports = finish_all(second_runner_engine(), specs, between)

    assert texts == expected(specs)
    assert sum(report.accepted for report in reports) > sum(report.drafted for report in reports) // 3


@pytest.mark.parametrize("budget", [512, 24])
def test_committed_tokens_are_output_to_the_runner(budget: int) -> None:
    """With a small budget a context takes several steps, and the first token comes after the last one."""
    specs = [
        replace(one, committed_ids=tuple(expected([one])[one.request_id][: 1 + 3 * at]))
        for at, one in enumerate(mixed(PLACES))
    ]
    texts, last, _ = finish_all(second_runner_engine(budget=budget), specs, rotate("evict"))

    assert texts == expected(specs)
    assert all(report.finish is not None for report in last.values())


@pytest.mark.parametrize("words", [((5,),) * 129, ((5,) * 16,) * 65], ids=["words", "tokens"])
def test_more_bad_words_than_the_runner_takes_are_refused(words: tuple[tuple[int, ...], ...]) -> None:
    (one,) = mixed(1)
    with pytest.raises(ValueError, match="bad_words_ids must be at most 128 lists of 1024 token ids"):
        second_runner_engine().add(replace(one, sampling=replace(one.sampling, bad_words_ids=words)))


def test_other_ends_of_texts_are_another_fingerprint_of_a_worker() -> None:
    """They may come from generation_config.json, which no other part of the fingerprint has."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="a/model", revision="main", dtype="bfloat16", quantization=None, hf_overrides={}
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )

    names = [fingerprint(config, TokenChooser.VLLM, ends, "0.32.0") for ends in ([1], [1, 7], [1])]

    assert names[0] == names[2] != names[1]
