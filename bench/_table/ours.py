"""Our engine for the table, in a process of its own: `python -m bench._table.ours SETUP.json`, which works as
`bench/_peer_driver.py` does for the others."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from bench._peer_driver import open_channel
from bench._peer_engines.engine import Progress, Refused
from bench._peer_engines.loops import send, serve
from bench._table.plan import QUANTIZED

WEIGHTS_OPTION = "quantization"
"""The option of `load_engine` for quantized weights, where it has one."""
THREADS_OPTION = "threads"
"""The option for the number of threads; an engine without it takes that of torch."""


class OurEngine:
    """A worker's engine without speculation."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch

        from worker_svc.engine.interface import ModelError
        from worker_svc.engine.load import load_engine

        torch.set_num_threads(setup["threads"])
        try:
            self._engine = load_engine(setup["target"], None, _options(setup))
        except (ModelError, ValueError) as error:
            raise Refused(str(error)) from error
        if getattr(self._engine, "all_by_kernels", False):
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


def _options(setup: dict[str, Any]) -> Any:
    """Return the options of an engine in this precision. Raise Refused if it has no such weights."""
    from worker_svc.engine.options import LoadOptions

    known = {field.name for field in dataclasses.fields(LoadOptions)}
    weights = setup["precision"] if setup["precision"] in QUANTIZED else None
    given: dict[str, Any] = {}
    if weights is not None:
        if WEIGHTS_OPTION not in known:
            raise Refused(f"this engine has no {weights} weights")
        given[WEIGHTS_OPTION] = weights
    if THREADS_OPTION in known:
        given[THREADS_OPTION] = setup["threads"]
    return LoadOptions(
        dtype="bfloat16" if weights else setup["precision"],
        slots=setup["slots"],
        max_length=setup["max_length"],
        drafter="none",
        **given,
    )


def main() -> None:
    channel = open_channel()
    setup = json.loads(Path(sys.argv[1]).read_text())
    try:
        engine = OurEngine(setup)
    except Refused as error:
        send(channel, {"refused": str(error)})
        return
    serve(engine, setup, channel)


if __name__ == "__main__":
    main()
