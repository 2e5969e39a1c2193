"""Other engines in interpreters of their own: the requests they get, and the use of their answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench._engine.cells import MIXED, Cell, Prompted
from bench._engine.options import arguments
from bench._peer_driver import generate
from bench._peers import Peer, PeerFailed, cell_name, setups, taken

# Repeats each prompt's first token, one token a step; for 13 it breaks.
ECHO = """
import sys
sys.path.insert(0, {root!r})
from bench import _peer_driver

class Echo:
    version = "1.0"
    def __init__(self, setup):
        self._limit, self._running = setup["tokens"], {{}}
    def add(self, number, ids):
        self._running[number] = (ids[0], [])
    def step(self):
        print("a library's chatter")
        for first, said in self._running.values():
            if first == 13:
                raise RuntimeError("unlucky")
            said.append(first)
        ended = [(number, said) for number, (_, said) in self._running.items() if len(said) == self._limit]
        for number, _ in ended:
            del self._running[number]
        return ended

import json, pathlib
channel = _peer_driver.open_channel()
setup = json.loads(pathlib.Path(sys.argv[1]).read_text())
_peer_driver.serve(Echo(setup), setup, channel)
"""


def cell(batch: int, *firsts: int) -> Cell:
    return Cell(MIXED, 0.0, batch, tuple(Prompted((first, 7), 0.0, n) for n, first in enumerate(firsts)))


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(root=str(Path(__file__).parents[2])))
    return [sys.executable, str(script)]


def setup_for(*cells: Cell) -> dict[str, object]:
    prompts = {cell_name(one): [list(request.ids) for request in one.requests] for one in cells}
    return {"tokens": 3, "ends": [9], "threads": 1, "prompts": prompts}


def test_a_peer_answers_cell_by_cell_whatever_its_libraries_print(program: list[str], tmp_path: Path):
    cells = [cell(1, 4, 5), cell(2, 6, 8, 9)]
    with Peer(program, setup_for(*cells), tmp_path, "echo, plain") as peer:
        assert peer.ready() == "1.0"
        first, second, again = (peer.run(one) for one in (*cells, cells[0]))
    assert first.outputs == again.outputs == [[4, 4, 4], [5, 5, 5]]
    assert second.outputs == [[6, 6, 6], [8, 8, 8], []]  # 9 ends a text
    assert second.tokens == 7
    assert first.cpu_s > 0
    assert first.decode_s is not None


def test_a_peer_that_breaks_is_told_with_its_last_words(program: list[str], tmp_path: Path):
    unlucky = cell(1, 13)
    with Peer(program, setup_for(unlucky), tmp_path, "echo") as peer:
        peer.ready()
        with pytest.raises(PeerFailed, match=r"(?s)echo ended with code 1.*unlucky"):
            peer.run(unlucky)


def test_a_peer_that_is_not_there_is_told(tmp_path: Path):
    command = [sys.executable, "-c", "import no_such_engine"]
    with Peer(command, setup_for(), tmp_path, "nobody") as peer, pytest.raises(PeerFailed, match="no_such"):
        peer.ready()


def test_never_more_requests_together_than_the_batch():
    class Counting:
        version = ""

        def __init__(self) -> None:
            self.running: dict[int, int] = {}
            self.most = 0

        def add(self, number: int, ids: list[int]) -> None:
            self.running[number] = ids[0]
            self.most = max(self.most, len(self.running))

        def step(self) -> list[tuple[int, list[int]]]:
            ended = [number for number, left in self.running.items() if left == 1]
            self.running = {n: left - 1 for n, left in self.running.items() if left > 1}
            return [(number, [number]) for number in ended]

    engine = Counting()
    answer = generate(engine, [[3], [1], [2], [5], [1]], 2)
    assert engine.most == 2
    assert answer["outputs"] == [[0], [1], [2], [3], [4]]


def test_the_modes_of_each_engine_and_what_they_are_compared_on():
    options = arguments(["--vllm", "v", "--openvino", "o"], "")
    options.target, options.draft, options.ends = Path("t"), Path("d"), frozenset({2})
    cells = [cell(1, 4), Cell(MIXED, 0.8, 1, ()), Cell("code", 0.0, 1, ())]
    assert [taken(one) for one in cells] == [True, False, False]
    found = setups(options, cells, Path("folder"))
    assert [(python, name) for python, name, _ in found] == [
        ("v", "vllm, eager, plain"),
        ("v", "vllm, eager, draft 4"),
        ("v", "vllm, compiled, plain"),
        ("v", "vllm, compiled, draft 4"),
        ("o", "openvino, plain"),
        ("o", "openvino, draft 4"),
    ]
    assert all(list(setup["prompts"]) == [cell_name(cells[0])] for _, _, setup in found)
    options.acceptance = 0.7
    assert [name for _, name, _ in setups(options, cells, Path("folder"))] == [
        "vllm, eager, plain",
        "vllm, compiled, plain",
        "openvino, plain",
    ], "no text of theirs is kept by a coin"
