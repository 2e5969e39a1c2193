"""Synthetic acceptance: a coin keeps draft tokens, so that random weights can be timed as if their draft were
good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench._synthetic import synthetic
from tests.worker.drive import finish_all
from tests.worker.pairs import llama_config, load_pair, write_model
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import RequestRound, Sampling, Specification

DRAFT_LEN = 3


@pytest.fixture(scope="module")
def device() -> str:
    return os.environ.get("LAPS_SD_TEST_DEVICE", "cpu")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two random models that agree on nothing."""
    root = tmp_path_factory.mktemp("strangers")
    return write_model(root / "target", llama_config(), seed=0), write_model(
        root / "draft", llama_config(), seed=9
    )


def engine_with(pair: tuple[Path, Path], device: str, acceptance: float | None) -> SpeculativeEngine:
    engine = load_pair(*pair, device=device, slots=8, max_length=96, draft_len=DRAFT_LEN)
    return synthetic(engine, acceptance)


def specs(count: int = 8) -> list[Specification]:
    return [
        Specification(f"r{n}", (n + 2, 5, 7), (), Sampling(seed=n), 60, ignore_eos=True) for n in range(count)
    ]


def rounds(engine: SpeculativeEngine) -> tuple[dict[str, list[int]], list[RequestRound]]:
    output, _, reports = finish_all(engine, specs())
    return output, reports


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_never_and_always(strangers: tuple[Path, Path], device: str, rate: float) -> None:
    output, reports = rounds(engine_with(strangers, device, rate))
    assert sum(report.drafted for report in reports) > 100
    assert all(report.accepted == rate * report.drafted for report in reports)
    if rate == 0:
        assert output == rounds(engine_with(strangers, device, None))[0]  # the target's output is left


def test_a_rate_is_met_by_each_position_and_repeats_itself(strangers: tuple[Path, Path], device: str) -> None:
    output, reports = rounds(engine_with(strangers, device, 0.7))
    for at in range(DRAFT_LEN):
        tested = sum(report.tested > at for report in reports)
        kept = sum(report.accepted > at for report in reports)
        assert tested > 50
        assert abs(kept - 0.7 * tested) < 4 * (0.7 * 0.3 * tested) ** 0.5
    assert output == rounds(engine_with(strangers, device, 0.7))[0]


def test_the_context_is_what_was_kept(strangers: tuple[Path, Path], device: str) -> None:
    """The token after the kept proposals is the target's own choice in that context."""
    engine = engine_with(strangers, device, 0.7)
    output, reports = rounds(engine)
    model = AutoModelForCausalLM.from_pretrained(strangers[0]).to(device).eval()
    prompts = {spec.request_id: list(spec.prompt_ids) for spec in specs()}
    for name, tokens in output.items():
        with torch.inference_mode():
            ids = torch.tensor([prompts[name] + tokens], device=device)
            choices = model(ids).logits[0].argmax(-1).tolist()
        for report in reports:
            if report.request_id == name and len(report.tokens) == report.accepted + 1:
                last = report.position + report.accepted
                assert tokens[last] == choices[len(prompts[name]) + last - 1]


def test_it_has_another_fingerprint_and_a_bounded_rate(strangers: tuple[Path, Path], device: str) -> None:
    engine = engine_with(strangers, device, None)
    fingerprint = engine.fingerprint
    with pytest.raises(ValueError, match=r"synthetic acceptance must be from 0 to 1, not 1\.5"):
        synthetic(engine, 1.5)
    assert synthetic(engine, None).fingerprint == fingerprint
    assert synthetic(engine, 0.7).fingerprint != fingerprint
