"""A model's generation_config.json gives the defaults of requests that set none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.calls.completion import complete
from gateway.model.files import ModelFiles, ModelFilesError, load_model
from gateway.settings import GatewaySettings
from laps_sd.v1.inference_pb2 import GenerateRequest, SamplingParams
from tests.services.gateway.conftest import write_model

RECOMMENDED = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "repetition_penalty": 1.25,
    "max_new_tokens": 50,
}


def load(tmp_path: Path, config: dict[str, Any], **options: bool) -> ModelFiles:
    directory = write_model(tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(config))
    return load_model(directory, name="tiny", **options)


def filled_in(model: ModelFiles, **sampling: Any) -> SamplingParams:
    """Return the parameters that a worker gets."""
    request = GenerateRequest(text="x", sampling=SamplingParams(**sampling))
    submit = complete(request, [1, 2], settings=GatewaySettings(), model=model, tenant="t", fallback_seed=9)
    return submit.specification.sampling


def test_what_a_request_leaves_open_is_as_recommended(tmp_path: Path) -> None:
    found = filled_in(load(tmp_path, RECOMMENDED), top_p=1.0)
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.5, 20, 1.25)
    assert (found.top_p, found.max_tokens, found.seed) == (1.0, 50, 9)


def test_a_request_may_be_longer_than_recommended(tmp_path: Path) -> None:
    model = load(tmp_path, RECOMMENDED)
    assert filled_in(model, max_tokens=60).max_tokens == 60
    assert filled_in(model, min_tokens=70).max_tokens == 70


def test_a_setting_turns_recommendations_off(tmp_path: Path) -> None:
    found = filled_in(load(tmp_path, RECOMMENDED | {"temperature": "hot"}, recommendations=False))
    assert (found.temperature, found.top_p, found.HasField("top_k")) == (1.0, 1.0, False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"temperature": "hot"}, "temperature must be from 0 to 100, got 'hot'"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number above 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_the_way_out(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelFilesError, match=said) as error:
        load(tmp_path, config)
    assert "generation_config.json" in str(error.value)
    assert "LAPS_SD_GENERATION_CONFIG=none" in str(error.value)


def test_nulls_are_absent(tmp_path: Path) -> None:
    assert load(tmp_path, dict.fromkeys(RECOMMENDED)).recommended == SamplingParams()
