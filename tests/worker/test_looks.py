"""The probe inside the engine: when it looks at a request of the shipped pair, what it sees, and what it
learns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.prompts import demo_prompts
from laps_sd.contract.ends import End
from tests.worker.drive import finish_all, rotate
from tests.worker.recorded import Recorded, Seen
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import RequestRound, Sampling, Specification
from worker_svc.engine.length_probe.probe import EVERY_TOKENS, LEAST_REQUESTS, LengthProbe
from worker_svc.engine.load import load_engine
from worker_svc.engine.options import LoadOptions

MAX_TOKENS = 200
KINDS = ("story", "log", "list", "chat")


@pytest.fixture(scope="module")
def specs() -> list[Specification]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    prompts = [prompt for kind in KINDS for prompt in demo_prompts(kind, 16, seed=3)]
    random.Random(0).shuffle(prompts)
    return [
        Specification(
            f"r{n}", tuple(tokenizer(prompt.text)["input_ids"]), (), Sampling(0.9, seed=n), MAX_TOKENS
        )
        for n, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[..., SpeculativeEngine]]:
    def build(**options: Any) -> SpeculativeEngine:
        sizes = {"slots": 8, "max_length": 512, "max_draft_len": 4, "draft_len": 3}
        return load_engine(TARGET_DIR, DRAFT_DIR, LoadOptions(**{**sizes, **options}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker_svc.engine.load.LengthProbe", Recorded)
        yield build


def seen_by(engine: SpeculativeEngine) -> list[Seen]:
    probe = engine.length_probe
    assert isinstance(probe, Recorded)
    return list(probe.seen.values())


def one_by_one(
    engine: SpeculativeEngine, specs: list[Specification]
) -> tuple[dict[str, list[int]], dict[str, list[RequestRound]]]:
    """Run the requests one after the other; return outputs and reports by request."""
    outputs, reports = {}, {}
    for spec in specs:
        output, _, rounds = finish_all(engine, [spec])
        outputs |= output
        reports[spec.request_id] = rounds
    return outputs, reports


# -- what it sees --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_kernels_and_by_torch")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])
@torch.inference_mode()
def test_it_sees_the_hidden_state_of_the_last_token_before_the_round(
    load: Any, specs: list[Specification], fused: bool
) -> None:
    """With speculation, prompts in chunks, and requests that lose their KV in between."""
    engine = load(fused=fused, prefill_chunk=48, slots=4)
    probe = engine.length_probe
    assert isinstance(probe, Recorded) and probe.kind.layer == 3
    chosen = [replace(spec, max_tokens=80) for spec in specs[:6]]
    outputs, *_ = finish_all(engine, chosen, rotate("evict", every=20))
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()
    states = {}
    for spec in chosen:
        ids = torch.tensor([[*spec.prompt_ids, *outputs[spec.request_id]]])
        states[spec.request_id] = model(input_ids=ids, output_hidden_states=True).hidden_states[3][0].numpy()
    looks = 0
    for seen in seen_by(engine):
        first = seen.looks[0][1]
        (spec,) = [
            spec
            for spec in chosen
            if np.allclose(states[spec.request_id][len(spec.prompt_ids) - 1], first, atol=1e-3)
        ]
        for output_tokens, hidden in seen.looks:
            right = states[spec.request_id][len(spec.prompt_ids) + output_tokens - 1]
            np.testing.assert_allclose(hidden, right, rtol=1e-3, atol=1e-3)
            looks += 1
    assert looks > len(chosen)


def test_it_looks_after_the_prompt_and_then_every_so_many_tokens(
    load: Any, specs: list[Specification]
) -> None:
    engine = load(prefill_chunk=16)
    outputs, _ = one_by_one(engine, specs[:12])
    for seen, output in zip(seen_by(engine), outputs.values(), strict=True):
        at = [tokens for tokens, _ in seen.looks]
        assert at[0] == 0
        steps = np.diff([*at, len(output)])
        assert all(EVERY_TOKENS <= step <= EVERY_TOKENS + 4 for step in steps[:-1])
        assert steps[-1] <= EVERY_TOKENS + 4


def test_a_request_that_comes_with_tokens_is_looked_at_first_with_these(
    load: Any, specs: list[Specification]
) -> None:
    engine = load()
    output = one_by_one(engine, specs[:1])[0][specs[0].request_id]
    moved = replace(specs[0], request_id="moved", committed_ids=tuple(output[:2]))
    one_by_one(engine, [moved])
    assert [tokens for tokens, _ in seen_by(engine)[1].looks][:1] == [2]


# -- what it learns ------------------------------------------------------------------------------------------


def test_it_learns_from_every_end_but_errors_and_drops(load: Any, specs: list[Specification]) -> None:
    engine = load()
    ended, cut, endless = specs[3], replace(specs[1], max_tokens=3), replace(specs[2], ignore_eos=True)
    outputs, reports = one_by_one(engine, [ended, cut, endless])
    assert reports[ended.request_id][-1].finish is End.STOP
    assert reports[cut.request_id][-1].finish is End.LENGTH
    engine.add(specs[4])
    engine.round([specs[4].request_id])
    engine.drop(specs[4].request_id)
    first, second, dropped = seen_by(engine)  # the endless one is not watched
    assert first.ends == [(len(outputs[ended.request_id]), False)]
    assert second.ends == [(3, True)]
    assert dropped.ends == []
    assert engine.length_probe.requests == 2


def test_a_failure_of_the_probe_ends_predictions_and_nothing_else(
    load: Any, specs: list[Specification], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, _ = one_by_one(load(), specs[:3])
    engine = load()

    def fail(*_: object) -> None:
        raise ArithmeticError("a number that no hidden state has")

    monkeypatch.setattr(engine.length_probe, "look", fail)
    outputs, _ = one_by_one(engine, specs[:3])

    assert outputs == right
    assert engine.length_probe is None
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the probe failed: no output lengths are predicted any more"
    ]


@pytest.fixture(scope="module")
def learnt(load: Any, specs: list[Specification]) -> tuple[SpeculativeEngine, dict[str, list[RequestRound]]]:
    """Return an engine that has run all requests, with its reports; running them takes most of this file."""
    engine = load()
    return engine, one_by_one(engine, specs)[1]


def test_it_predicts_once_it_has_learnt_from_enough(learnt: Any) -> None:
    _, reports = learnt
    given = [any(one.predicted_remaining_tokens for one in rounds) for rounds in reports.values()]
    assert not any(given[:LEAST_REQUESTS])
    assert given[-1]
    for rounds in reports.values():
        for report in rounds:
            predicted = report.predicted_remaining_tokens
            if predicted is not None:
                assert report.tokens and report.finish is None
                assert 1 <= predicted <= MAX_TOKENS - report.position


def test_a_prediction_is_at_most_what_max_tokens_leaves(learnt: Any, specs: list[Specification]) -> None:
    engine, _ = learnt
    _, reports = one_by_one(
        engine, [replace(spec, request_id=f"short-{spec.request_id}", max_tokens=6) for spec in specs]
    )
    predicted = [
        (report.predicted_remaining_tokens, report.position + len(report.tokens))
        for rounds in reports.values()
        for report in rounds
        if report.predicted_remaining_tokens is not None
    ]
    assert len(predicted) > 20
    assert all(remaining + so_far <= 6 for remaining, so_far in predicted)


# -- what it must not change ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_kernels_and_by_torch")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])
def test_the_text_is_the_same_with_and_without_a_probe(
    load: Any, specs: list[Specification], fused: bool
) -> None:
    chosen = [replace(spec, max_tokens=100) for spec in specs[:10]]
    with_probe, without = (
        finish_all(load(fused=fused, length_probe=on), chosen, rotate("swap"))[0] for on in (True, False)
    )
    assert with_probe == without


def test_without_a_probe_nothing_is_predicted(load: Any, specs: list[Specification]) -> None:
    engine = load(length_probe=False)
    assert engine.length_probe is None
    *_, reports = finish_all(engine, specs[:4])
    assert all(report.predicted_remaining_tokens is None for report in reports)


def test_a_probe_that_fails_is_switched_off_and_the_round_goes_on(
    load: Any, specs: list[Specification], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, usual = load(), load(length_probe=False)
    looks = []

    def failing(self: LengthProbe, *args: Any) -> None:
        looks.append(args)
        raise MemoryError

    monkeypatch.setattr(Recorded, "look", failing)
    chosen = specs[:6]
    assert finish_all(engine, chosen)[0] == finish_all(usual, chosen)[0]
    assert len(looks) == 1
    assert "no output lengths are predicted any more" in caplog.text
