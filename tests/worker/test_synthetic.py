"""Synthetic acceptance: a coin keeps proposals, so that random weights can be timed as if their draft were good."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker.drive import finish_all
from tests.worker.pairs import llama_config, write_model
from worker_svc.engine.engine import SpeculativeEngine, load_engine
from worker_svc.engine.interface import RequestRound, Sampling, Specification
from worker_svc.settings import WorkerSettings

DRAFT_LEN = 3


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two random models that agree on nothing."""
    root = tmp_path_factory.mktemp("strangers")
    return write_model(root / "target", llama_config(), seed=0), write_model(
        root / "draft", llama_config(), seed=9
    )


def engine_with(pair: tuple[Path, Path], device: str, **more: Any) -> SpeculativeEngine:
    return load_engine(*pair, device=device, slots=8, max_length=96, draft_len=DRAFT_LEN, **more)


def specs(count: int = 8) -> list[Specification]:
    return [
        Specification(f"r{n}", (n + 2, 5, 7), (), Sampling(seed=n), 60, ignore_eos=True) for n in range(count)
    ]


def rounds(engine: SpeculativeEngine) -> tuple[dict[str, list[int]], list[RequestRound]]:
    output, _, reports = finish_all(engine, specs())
    return output, reports


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_never_and_always(strangers: tuple[Path, Path], device: str, rate: float) -> None:
    output, reports = rounds(engine_with(strangers, device, synthetic_acceptance=rate))
    assert sum(report.drafted for report in reports) > 100
    assert all(report.accepted == rate * report.drafted for report in reports)
    if rate == 0:
        assert output == rounds(engine_with(strangers, device))[0]  # the target's output is left


def test_a_rate_is_met_by_each_position_and_repeats_itself(strangers: tuple[Path, Path], device: str) -> None:
    output, reports = rounds(engine_with(strangers, device, synthetic_acceptance=0.7))
    for at in range(DRAFT_LEN):
        tested = sum(len(report.tested_by_position) > at for report in reports)
        kept = sum(report.accepted > at for report in reports)
        assert tested > 50
        assert abs(kept - 0.7 * tested) < 4 * (0.7 * 0.3 * tested) ** 0.5
    assert output == rounds(engine_with(strangers, device, synthetic_acceptance=0.7))[0]


def test_the_context_is_what_was_kept(strangers: tuple[Path, Path], device: str) -> None:
    """The token after the kept proposals is the target's own choice in that context."""
    engine = engine_with(strangers, device, synthetic_acceptance=0.7)
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


def test_it_is_for_benchmarks_only(strangers: tuple[Path, Path], device: str) -> None:
    plain, synthetic = (
        engine_with(strangers, device),
        engine_with(strangers, device, synthetic_acceptance=0.7),
    )
    assert plain.fingerprint != synthetic.fingerprint
    assert not [field.name for field in dataclasses.fields(WorkerSettings) if "synthetic" in field.name]
    with pytest.raises(ValueError, match=r"synthetic_acceptance must be from 0 to 1, not 1\.5"):
        engine_with(strangers, device, synthetic_acceptance=1.5)
