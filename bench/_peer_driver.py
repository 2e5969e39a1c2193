"""Generates with another engine, for `laps-sd bench engine`: `OTHER_PYTHON bench/_peer_driver.py SETUP.json`.

Runs in the interpreter that has that engine, so it imports nothing but the standard library and the engine.
The setup names the engine and mode, the models, the limits, and the prompts of every cell. After loading it
prints `{"ready": ...}`; then each line on stdin, `{"cell": NAME, "batch": N}`, is answered with one line: the
tokens of every prompt, and CPU and wall-clock seconds. The end of stdin ends it.

The engine works inside this process: its CPU time is that of all threads of the process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class PeerEngine(Protocol):
    """Interface of an engine to the loop. All of it at temperature 0."""

    version: str

    def add(self, number: int, ids: list[int]) -> None:
        """Begin a request."""

    def step(self) -> list[tuple[int, list[int]]]:
        """Compute once; return the requests that ended, with their output tokens."""


class Vllm:
    """vLLM, one scheduler step at a time, without its second process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import vllm

        self.version = vllm.__version__
        speculative = None
        if setup["draft_len"]:
            speculative = {
                "method": "draft_model",
                "model": setup["draft"],
                "num_speculative_tokens": setup["draft_len"],
            }
        self._engine = vllm.LLM(
            model=setup["target"],
            dtype=setup["dtype"],
            max_model_len=setup["max_length"],
            max_num_seqs=setup["slots"],
            enforce_eager=not setup["compiled"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=speculative,
        ).llm_engine
        self._sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=setup["tokens"],
            ignore_eos=not setup["ends"],
            stop_token_ids=setup["ends"],
            detokenize=False,
        )

    def add(self, number: int, ids: list[int]) -> None:
        self._engine.add_request(str(number), {"prompt_token_ids": ids}, self._sampling)

    def step(self) -> list[tuple[int, list[int]]]:
        # A request id may come back with a suffix.
        return [
            (int(done.request_id.split("-")[0]), list(done.outputs[0].token_ids))
            for done in self._engine.step()
            if done.finished
        ]


class OpenVino:
    """OpenVINO GenAI's continuous batching on converted models."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.version = str(openvino_genai.__version__)
        self._tensor: Any = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        precision = {"float32": "f32", "bfloat16": "bf16"}[setup["dtype"]]
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
        self._config.max_new_tokens = setup["tokens"]
        self._config.do_sample = False
        self._config.ignore_eos = not setup["ends"]
        if setup["ends"]:
            self._config.stop_token_ids = set(setup["ends"])
        if setup["draft_len"]:
            self._config.num_assistant_tokens = setup["draft_len"]
        self._finished = openvino_genai.GenerationStatus.FINISHED
        self._running: dict[int, Any] = {}
        self._outputs: dict[int, list[int]] = {}

    def add(self, number: int, ids: list[int]) -> None:
        self._running[number] = self._pipeline.add_request(number, self._tensor(ids), self._config)
        self._outputs[number] = []

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipeline.step()
        done = []
        for number, handle in list(self._running.items()):
            while handle.can_read():
                for part in handle.read().values():
                    self._outputs[number].extend(part.generated_ids)
            if handle.get_status() == self._finished:
                del self._running[number]
                done.append((number, self._outputs.pop(number)))
        return done


def convert(setup: dict[str, Any]) -> None:
    """Convert both models to OpenVINO's form, in the folders that the setup names."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    for source, folder in (
        (setup["target"], setup["converted_target"]),
        (setup["draft"], setup["converted_draft"]),
    ):
        OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=False).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source)
        for name, part in zip(
            ("openvino_tokenizer", "openvino_detokenizer"),
            convert_tokenizer(tokenizer, with_detokenizer=True),
            strict=True,
        ):
            openvino.save_model(part, str(Path(folder) / f"{name}.xml"))


def generate(engine: PeerEngine, prompts: list[list[int]], batch: int) -> dict[str, Any]:
    """Generate from all prompts, first come, first served, at most `batch` together."""
    waiting = list(enumerate(prompts))[::-1]
    running = 0
    outputs: list[list[int]] = [[] for _ in prompts]
    decode: list[float] = []
    wall, cpu = time.monotonic(), time.process_time()
    while waiting or running:
        fresh = bool(waiting) and running < batch
        while waiting and running < batch:
            engine.add(*waiting.pop())
            running += 1
        whole, began = running == batch and not fresh, time.process_time()
        ended = engine.step()
        if whole:
            decode.append(time.process_time() - began)
        for number, tokens in ended:
            outputs[number] = tokens
            running -= 1
    return {
        "outputs": outputs,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - wall,
        "decode_s": statistics.median(decode) if decode else None,
    }


def serve(engine: PeerEngine, setup: dict[str, Any], channel: Any) -> None:
    """Answer cells until stdin ends."""
    print(json.dumps({"ready": engine.version}), file=channel, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = generate(engine, setup["prompts"][asked["cell"]], asked["batch"])
        print(json.dumps(answer), file=channel, flush=True)


def open_channel() -> Any:
    """Return the channel of the answers: the original stdout, while all output of
    libraries goes to stderr.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def main() -> None:
    """Run the engine that the setup names."""
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
    channel = open_channel()
    setup = json.loads(Path(sys.argv[1]).read_text())
    if setup["task"] == "convert":
        convert(setup)
    else:
        engines: dict[str, Callable[[dict[str, Any]], PeerEngine]] = {"vllm": Vllm, "openvino": OpenVino}
        serve(engines[setup["engine"]](setup), setup, channel)


if __name__ == "__main__":
    main()
