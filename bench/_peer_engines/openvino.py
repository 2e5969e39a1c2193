"""OpenVINO GenAI's continuous batching on converted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench._peer_engines.engine import Progress

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    def __init__(self, setup: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.version = str(openvino_genai.__version__)
        self._tensor: Any = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        precision = PRECISIONS[setup["dtype"]]
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": setup["threads"],
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = setup["slots"]
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False
        if setup["draft_len"]:
            properties["draft_model"] = openvino_genai.draft_model(
                str(setup["converted_draft"]), "CPU", **properties
            )
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(setup["converted_target"]), scheduler, "CPU", properties
        )
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        self._config.ignore_eos = not setup["ends"]
        if setup["ends"]:
            self._config.stop_token_ids = set(setup["ends"])
        if setup["draft_len"]:
            self._config.num_assistant_tokens = setup["draft_len"]
        self._finished = openvino_genai.GenerationStatus.FINISHED
        self._running: dict[int, Any] = {}

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        self._config.max_new_tokens = tokens
        self._running[number] = self._pipeline.add_request(number, self._tensor(ids), self._config)

    def step(self) -> list[Progress]:
        self._pipeline.step()
        found = []
        for number, handle in list(self._running.items()):
            tokens: list[int] = []
            while handle.can_read():
                for part in handle.read().values():
                    tokens.extend(part.generated_ids)
            ended = handle.get_status() == self._finished
            if ended:
                del self._running[number]
            if tokens or ended:
                found.append(Progress(number, tokens, ended))
        return found


def convert(source: str, folder: Path, tokenizer: str, weights: str, group: int) -> None:
    """Convert a model directory to OpenVINO's form in `folder`, with the tokenizer of another directory.

    `weights`: int8 (one scale for each output) or int4 (one for each `group` inputs), else as they are. Without
    offsets they are 1.05 and 1.25 times as fast as with them, which is the default.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    more: dict[str, Any] = {"load_in_8bit": False}
    if weights == "int8":
        more = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=True)}
    elif weights == "int4":
        more = {"quantization_config": OVWeightQuantizationConfig(bits=4, sym=True, group_size=group)}
    OVModelForCausalLM.from_pretrained(source, export=True, **more).save_pretrained(folder)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(tokenizer), with_detokenizer=True)
    for name, part in zip(("openvino_tokenizer", "openvino_detokenizer"), parts, strict=True):
        openvino.save_model(part, str(folder / f"{name}.xml"))
