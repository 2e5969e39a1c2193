"""Configurations: the ways to generate that are compared, and the cells that each of them takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench._engine.cells import MIXED, PEER_BATCH, Cell
from bench._engine.engines import Ours, Transformers
from bench._engine.outcomes import Outcome, together
from bench._peers import DRIVER, Peer, PeerFailed, convert, setups, taken
from bench.report import progress

SPECULATIVE, PLAIN = "ours, speculative", "ours, plain"


@dataclass
class Config:
    """One way to generate, with its outcomes: one of every turn, by cell; of our engine one of every pass."""

    name: str
    run: Callable[[Cell], Outcome | Generator[None, None, Outcome]]
    """Function that generates a cell. Modes of our engine run in slices, in turn."""
    takes: Callable[[Cell], bool]
    outcomes: dict[tuple[str, float, int], list[Outcome]] = field(default_factory=dict)

    def series(self, kind: str, temperatures: Sequence[float], batch: int) -> list[Outcome]:
        """Return all outcomes, in order, the temperatures together; an empty list if it was not measured
        there.
        """
        parts = [self.outcomes.get((kind, temperature, batch), []) for temperature in temperatures]
        return [together(turn) for turn in zip(*parts, strict=True)] if all(parts) else []


def ours(options: argparse.Namespace) -> list[Config]:
    """Return our engine's configurations: at each batch size without speculation and with it."""
    found = []
    for batch in options.batch:
        engine = Ours(options, batch)
        for name, draft_len in ((PLAIN, 0), (SPECULATIVE, None)):
            found.append(Config(name, engine.mode(name, draft_len), _of_batch(batch)))
    return found


def _of_batch(batch: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.batch == batch


def transformers_modes(options: argparse.Namespace) -> list[Config]:
    """Return transformers' own modes. It has no synthetic acceptance: with one, assisted generation would
    have no equivalent to compare with.
    """
    peer = Transformers(options)

    def mix_of(batch: int) -> Callable[[Cell], bool]:
        return lambda cell: cell.kind == MIXED and cell.batch == batch

    return [
        Config("generate", peer.one_by_one, mix_of(1)),
        *(
            [
                Config("assisted, 4", peer.assisted(4), mix_of(1)),
                Config("assisted", peer.assisted(None), mix_of(1)),
            ]
            if options.acceptance is None
            else []
        ),
        Config("padded batch", peer.padded, mix_of(PEER_BATCH)),
        Config("generate_batch", peer.continuous, mix_of(PEER_BATCH)),
    ]


def other_engines(
    options: argparse.Namespace, cells: Sequence[Cell], folder: Path, stack: ExitStack
) -> tuple[list[Config], dict[str, str]]:
    """Return the engines in interpreters of their own, ready, and their versions. An engine that is not
    available is reported and left out.
    """
    found, versions = [], {}
    converted = False
    for python, name, setup in setups(options, cells, folder):
        try:
            if setup["engine"] == "openvino" and not converted:
                progress("converting the pair for OpenVINO")
                convert(
                    python,
                    folder,
                    engine="openvino",
                    models=[(setup[name], setup[f"converted_{name}"]) for name in ("target", "draft")],
                )
                converted = True
            progress(f"starting {name}")
            peer = stack.enter_context(Peer([python, str(DRIVER)], setup, folder, name))
            versions[setup["engine"]] = peer.ready()
        except (PeerFailed, OSError) as error:
            progress(f"{name} does not run here: {error}")
            continue
        found.append(Config(name, peer.run, lambda cell: taken(cell) and cell.batch in options.batch))
    return found, versions
