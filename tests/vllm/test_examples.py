"""vLLM has what the examples for Kubernetes and the chart give it: arguments of these names, and these flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")
yaml = pytest.importorskip("yaml")

from vllm.config import SpeculativeConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

K8S = Path(__file__).parents[2] / "k8s"
BY_THE_CHART = {"tensor_parallel_size", "pipeline_parallel_size", "speculative_config"}


def loaded(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((K8S / "examples" / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["values-vllm-8b.yaml", "values-vllm-70b.yaml"])
def test_the_arguments_of_an_example_are_vllms(name: str) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    of_speculation = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    (values,) = loaded(name)
    (pool,) = values["pools"]
    given = pool["workers"]["vllmArgs"]

    assert set(given) | BY_THE_CHART <= known
    assert {*given["speculative_config"], "model"} <= of_speculation


def test_the_flags_of_the_plain_server_are_vllms() -> None:
    (deployment,) = (one for one in loaded("vllm-serve.yaml") if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    model, *flags = container["args"]

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", model, *flags])

    assert parsed.scheduler_cls == "laps_vllm.scheduler.LapsScheduler"
    assert (parsed.max_num_seqs, parsed.max_num_active_seqs) == (256, 64)
    assert parsed.speculative_config["method"] == "eagle3"
