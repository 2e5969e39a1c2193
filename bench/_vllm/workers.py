"""A worker over vLLM against vLLM alone: tokens per second of CPU time on the same requests, in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from bench._peers import Peer
from bench._vllm.workload import demo_workload
from bench.report import progress

PLAIN, OWN, COUPLED = "vLLM alone", "worker, vLLM's sampler", "worker, coupled"
SAMPLING = {OWN: "own", COUPLED: "coupled"}
COUNT = 100
SEED = 3000


def workers(peers: Mapping[str, Peer], turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each run. `peers` by mode: vLLM alone runs where vLLM's own sampler is."""
    for turn in range(turns):
        ids = [list(one) for one in demo_workload(COUNT, SEED + turn).ids]
        order = [PLAIN, OWN, COUPLED]
        random.Random(turn).shuffle(order)
        answers = {}
        for mode in order:
            peer = peers[OWN if mode == PLAIN else mode]
            answers[mode] = peer.ask({"task": "plain" if mode == PLAIN else "engine", "ids": ids})
        for mode in (PLAIN, OWN, COUPLED):
            found = answers[mode]
            same = sum(a == b for a, b in zip(found["texts"], answers[PLAIN]["texts"], strict=True))
            speed = found["tokens"] / found["cpu_s"]
            progress(
                f"turn {turn}: {mode}, {speed:.0f} tokens per CPU second, {same} of {COUNT} texts as vLLM's"
            )
            yield {
                "measured": "worker",
                "setting": f"{COUNT} requests",
                "seed": turn,
                "mode": mode,
                "tokens": found["tokens"],
                "cpu_s": round(found["cpu_s"], 4),
                "lasted_s": round(found["lasted_s"], 4),
                "steps": found["steps"],
                "worker_speed": round(speed, 1),
                "same_texts": same,
            }
