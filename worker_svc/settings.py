"""Settings of a worker process."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from laps_sd.service.adapters import adapter_problems
from laps_sd.service.config import field
from laps_sd.service.cores import MOST_THREADS
from laps_sd.service.leader_link import HEARTBEAT_S, LEAST_SILENCE_S
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.wire import LinkSettings
from worker_svc.vllm_arguments import arguments_of, problems_of

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ServingSettings, LinkSettings):
    """One worker: one model pair on one device, in one pool."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "pool": "Worker",
        "engine": "Models",
        "vllm_args": "Engine vllm",
        "slots": "Size",
        "scheduler_seeds_file": "Link to the scheduler",
        "fake_time_scale": "Engine fake",
    }

    # -- who it is
    pool: str = field("demo", help="The pool this worker belongs to; a scheduler of another pool refuses it")
    worker_name: str = field("", help="Name that survives restarts; empty: the host's name")
    grpc_port: int = field(
        0,
        help="Port of the health service (nothing else is served); 0 takes a free one",
        minimum=0,
        maximum=65535,
    )
    metrics_port: int | None = field(
        9092,
        help="Port of the Prometheus endpoint, at LAPS_SD_GRPC_HOST; 0 takes a free one, empty serves none",
        minimum=0,
        maximum=65535,
    )
    drain_s: float = field(
        60.0,
        help="Time that requests get to move to other workers after the first signal; other workers then "
        "continue the rest from their committed tokens",
        minimum=0.0,
        maximum=86400.0,
    )

    # -- the model pair
    engine: Literal["auto", "demo", "fake", "vllm"] = field(
        "auto",
        help="auto: LAPS_SD_TARGET if it is set, otherwise the demo pair; vllm: the same models in vLLM, which "
        "the worker's Python environment must have; fake: no model, scripted tokens",
    )
    target: Path | None = field(
        None,
        help="Directory of the target model, or its name on the Hugging Face hub (org/name or org/name@revision); "
        "none: the demo pair that ships with LAPS-SD",
    )
    draft: Path | None = field(
        None, help="The same for the draft model; none with LAPS_SD_TARGET set: no draft model"
    )
    drafter: Literal["auto", "model", "lookup", "none"] = field(
        "auto",
        help="Source of draft tokens: model is the draft model; lookup is prompt lookup, the tokens that "
        "followed the same tokens earlier in the context; auto: for each request and round the one that "
        "gains more, lookup without a draft model; none: plain decoding",
    )
    trust_remote_code: bool = field(
        False, help="Run Python code that comes with a model directory; it can do whatever this process can"
    )
    device: str = field(
        "cpu", help="cpu, cuda or cuda:N; this engine is slow on GPUs, LAPS_SD_ENGINE=vllm is for them"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        "auto",
        help="Arithmetic of both models; only float32 gives the same text on every kind of machine. auto: that of the "
        "target's config.json where this machine computes in it, otherwise float32; on the CPU bfloat16 needs AVX-512, AMX or "
        "the like. Set it for a pool of machines of different kinds",
    )
    quantization: Literal["none", "int8", "int4"] = field(
        "none",
        help="Quantise the weights of both models when they are loaded, in groups with a scale each: int8 leaves the text "
        "as good as it was, int4 costs a little of it, and both are faster on the CPU; none: as the checkpoint has them, "
        "which may be GPTQ, AWQ or GGUF",
    )
    deterministic: bool | None = field(
        None,
        help="Make the text independent of batch and preemption, bit for bit; empty: on CPUs in float32, and "
        "in bfloat16 where the kernels in C compute all of the target; GPUs and mixtures of experts cannot",
    )
    threads: int | None = field(
        None,
        help="Threads that compute a round on the CPU, at most the CPUs that the process may use; with the kernels in C "
        "the text does not depend on them. None: one for each core that it may use, which `laps-sd up` divides by its "
        "workers, and 256 at most; with vLLM 1",
        minimum=1,
        maximum=MOST_THREADS,
    )
    pin_threads: bool = field(
        False,
        help="Keep each of these threads on a core of its own, but for the first. Workers that share a machine must "
        "then have cores of their own (taskset, cpusets)",
    )

    # -- vLLM
    vllm_args: str | None = field(
        None,
        help="With LAPS_SD_ENGINE=vllm: further arguments of vLLM as a JSON object, by the names of its EngineArgs "
        '(tensor_parallel_size, quantization, speculative_config …); "model" may stand for LAPS_SD_TARGET',
    )
    adapters: tuple[str, ...] = field(
        (),
        help="With LAPS_SD_ENGINE=vllm: LoRA adapters of the target, as NAME=DIRECTORY with commas between them, or names of "
        "the Hugging Face hub in place of directories. Requests name one as their model; gateways need the same value",
    )
    vllm_residents: int | None = field(
        None,
        help="With LAPS_SD_ENGINE=vllm: largest number of requests with KV on the device, running and paused; "
        "default: four times LAPS_SD_SLOTS. Smaller: paused requests lose their KV sooner; larger: more memory "
        "for vLLM's batch",
        minimum=1,
        maximum=65536,
    )
    vllm_sampling: Literal["coupled", "own"] = field(
        "coupled",
        help="With LAPS_SD_ENGINE=vllm: coupled: the token depends on seed and position, with and without drafts; "
        "own: vLLM's sampler, for which equal seeds may give different text after a crash or with speculation",
    )
    vllm_overlap: Literal["auto", "on", "off"] = field(
        "auto",
        help="With LAPS_SD_ENGINE=vllm: prepare a round while the device works on the one before (vLLM's async "
        "scheduling), and report one round later; auto: where vLLM does so by default, on GPUs; not on CPUs",
    )

    # -- its size
    slots: int = field(
        8,
        help="Largest number of requests in one round; more slots raise throughput and the time of a round",
        minimum=1,
        maximum=65536,
    )
    kv_blocks: int | None = field(
        None,
        help="Blocks of each KV pool; none: computed from LAPS_SD_KV_MEMORY_BYTES, or if that is not set, "
        "enough for every slot",
        minimum=1,
        maximum=2**24,
    )
    kv_memory_bytes: int | None = field(
        None, help="Device memory for the KV of target and draft together", minimum=1, maximum=2**60
    )
    block_size: int = field(16, help="Tokens in a KV block", minimum=1, maximum=4096)
    host_bytes: int = field(
        2 * 2**30,
        help="Host memory for KV that was swapped out; when it is full, KV is discarded",
        minimum=0,
    )
    context_tokens: int | None = field(
        None,
        help="Largest sum of prompt and output tokens of a request; default: the value in the model's "
        "config.json, at most 8192. Gateways must have the same value",
        minimum=2,
    )
    max_draft_len: int = field(
        6, help="Largest number of tokens drafted per request and round", minimum=0, maximum=64
    )
    draft_len: int | None = field(
        None, help="Tokens drafted in every round; none: chosen by acceptance and cost", minimum=0, maximum=64
    )
    prefill_chunk: int = field(
        512,
        help="Largest number of context tokens computed in one round; LAPS_SD_MAX_ROUND_S bounds their time",
        minimum=1,
    )
    max_round_s: float = field(
        0.05,
        help="A round that computes context takes at most about this long, or 3 times as long as without it if that is "
        "longer. Smaller: shorter gaps between the tokens of other requests; larger: the first token of a long "
        "prompt comes sooner. 60: LAPS_SD_PREFILL_CHUNK alone bounds it",
        minimum=0.0,
        maximum=60.0,
    )

    prefix_reuse_tokens: int = field(
        64,
        help="KV of an earlier request is reused if a prompt begins with at least this many of the same "
        "tokens, and the same tenant sent it, or any tenant with LAPS_SD_SHARE_PROMPTS at the gateway. Smaller: more "
        "lookups for less gain. 0: never",
        minimum=0,
    )

    length_probe: bool = field(
        True,
        help="Predict the output length that remains of each request, from hidden states of the target; the worker "
        "learns it from its own requests, and sends predictions once they are better than a constant",
    )

    round_floor_s: float = field(
        0.0,
        help="A round takes at least this long, for measurements on a machine whose speed varies; 0: as long as it takes",
        minimum=0.0,
        maximum=60.0,
    )
    prefill_floor_s: float = field(
        0.0,
        help="Each context token that a round computes takes at least this long, in addition, for such measurements",
        minimum=0.0,
        maximum=1.0,
    )

    # -- the link
    scheduler_seeds_file: Path | None = field(
        None,
        help="File with the schedulers of the shard, host:port separated by commas or lines, in place of "
        "LAPS_SD_SCHEDULER_SEEDS; read before each attempt to find the leader, so it may change while the worker runs",
    )
    max_unacknowledged_tokens: int = field(
        256,
        help="Largest number of tokens of one request that no leader has acknowledged; at the limit the "
        "request pauses. Smaller: less is lost with this worker; larger: longer work through an outage",
        minimum=1,
    )
    max_unacknowledged_reports: int = field(
        1024,
        help="Largest number of round reports that no leader has acknowledged; at the limit the worker pauses",
        minimum=1,
    )
    heartbeat_s: float = field(
        1.0, help="Interval of heartbeats to the scheduler", minimum=0.01, maximum=HEARTBEAT_S
    )
    silence_s: float = field(
        5.0,
        help="A scheduler that has sent nothing for this long is given up",
        minimum=LEAST_SILENCE_S,
        maximum=600.0,
    )
    engine_silence_s: float = field(
        120.0,
        help="If the engine has not finished a round for this long when a new stream needs its state, the "
        "worker takes it as hanging and ends with an error, so that it is started again. Must be longer "
        "than any round",
        minimum=1.0,
        maximum=86400.0,
    )

    # -- the fake engine
    fake_time_scale: float = field(
        1.0,
        help="Speed of the fake engine: seconds slept per second of its cost model; 0 does not sleep",
        minimum=0.0,
    )
    fake_round_s: float = field(0.020, help="Fake engine: duration of an empty round", minimum=0.0)
    fake_output_tokens: int | None = field(
        None, help="Fake engine: median output length; none: every request runs to max_tokens", minimum=1
    )
    fake_deadly_seed: int | None = field(
        None,
        help="Fake engine: a round with a request of this seed kills the process, for tests of such requests",
        minimum=0,
    )

    def problems(self) -> Iterator[str]:
        """Yield the problems that no single field can check."""
        yield from super().problems()
        if not self.pool:
            yield "LAPS_SD_POOL must not be empty."
        if self.draft is not None and self.target is None:
            yield "LAPS_SD_DRAFT needs LAPS_SD_TARGET."
        if self.drafter == "model" and self.target is not None and self.draft is None:
            yield "LAPS_SD_DRAFTER=model needs LAPS_SD_DRAFT."
        if self.target is not None and self.engine not in ("auto", "vllm"):
            yield f"LAPS_SD_TARGET needs LAPS_SD_ENGINE=auto or vllm, got {self.engine}."
        if self.kv_blocks is not None and self.kv_memory_bytes is not None:
            yield "LAPS_SD_KV_BLOCKS and LAPS_SD_KV_MEMORY_BYTES exclude each other."
        if self.draft_len is not None and self.draft_len > self.max_draft_len:
            yield (
                f"LAPS_SD_DRAFT_LEN must be at most LAPS_SD_MAX_DRAFT_LEN ({self.max_draft_len}), "
                f"got {self.draft_len}."
            )
        yield from self._vllm_problems()
        if not self.device.replace(":", "").isalnum():
            yield f"LAPS_SD_DEVICE must be cpu, cuda or cuda:N, got {self.device!r}."

    def _vllm_problems(self) -> Iterator[str]:
        if self.engine == "vllm" and self.quantization != "none":
            yield (
                "LAPS_SD_QUANTIZATION is not for LAPS_SD_ENGINE=vllm: name it in LAPS_SD_VLLM_ARGS, as in "
                '\'{"quantization": "awq"}\'.'
            )
        yield from adapter_problems(self.adapters, with_directories=self.engine == "vllm")
        if self.engine != "vllm":
            if self.vllm_args is not None:
                yield f"LAPS_SD_VLLM_ARGS needs LAPS_SD_ENGINE=vllm, got {self.engine}."
            if self.adapters and self.engine != "fake":
                yield f"LAPS_SD_ADAPTERS needs LAPS_SD_ENGINE=vllm, got {self.engine}."
            return
        wrong = list(problems_of(self.vllm_args))
        yield from wrong
        if not wrong and self.target is not None and "model" in arguments_of(self.vllm_args):
            yield "LAPS_SD_TARGET and the 'model' of LAPS_SD_VLLM_ARGS exclude each other."
        if self.vllm_residents is not None and self.vllm_residents < self.slots:
            yield (
                f"LAPS_SD_VLLM_RESIDENTS must be at least LAPS_SD_SLOTS ({self.slots}), "
                f"got {self.vllm_residents}."
            )
        if self.deterministic:
            yield (
                "LAPS_SD_DETERMINISTIC is not for LAPS_SD_ENGINE=vllm: leave it out, and see vLLM's "
                "VLLM_BATCH_INVARIANT."
            )

    @property
    def name(self) -> str:
        """The worker's name, never empty."""
        return self.worker_name or socket.gethostname() or "worker"
