"""Our engine, a worker's without speculation."""

from __future__ import annotations

from typing import Any

from bench._peer_engines.engine import Progress, Refused


class Ours:
    def __init__(self, setup: dict[str, Any]) -> None:
        import torch

        from worker_svc.engine.interface import ModelError
        from worker_svc.engine.load import load_engine
        from worker_svc.engine.options import LoadOptions

        torch.set_num_threads(setup["threads"])
        options = LoadOptions(
            dtype=setup["dtype"],
            quantization=setup["quantization"],
            threads=setup["threads"],
            slots=setup["slots"],
            max_length=setup["max_length"],
            drafter="none",
        )
        try:
            self._engine = load_engine(setup["target"], None, options)
        except (ModelError, ValueError) as error:
            raise Refused(str(error)) from error
        if self._engine.all_by_kernels:
            torch.set_num_threads(1)  # as a worker does
        # That of a worker: "engine: cpu, 1 thread; all layers by the kernels in C; …".
        self.version = self._engine.facts[1].removeprefix("engine: ")

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        from worker_svc.engine.interface import Sampling, Specification

        self._engine.add(
            Specification(str(number), tuple(ids), (), Sampling(temperature=0.0), tokens, ignore_eos=True)
        )

    def step(self) -> list[Progress]:
        found = []
        for one in self._engine.round(sorted(self._engine.known(), key=int)).requests:
            if one.error is not None:
                raise RuntimeError(one.error)
            ended = one.finish is not None
            if ended:
                self._engine.drop(one.request_id)
            if one.tokens or ended:
                found.append(Progress(int(one.request_id), list(one.tokens), ended))
        return found
