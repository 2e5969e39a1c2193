"""Other engines in interpreters of their own: the requests they get, and the use of their answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench._engine.cells import MIXED, Cell, Prompted
from bench._engine.options import arguments
from bench._peer_engines.engine import Progress
from bench._peer_engines.loops import Steps, generate
from bench._peers import Peer, PeerFailed, cell_name, setups, taken

# Repeats each prompt's first token, one token a step; for 13 it breaks.
ECHO = """
import sys
sys.path.insert(0, {root!r})

class Echo:
    version = "1.0"
    def __init__(self, setup):
        self._running = {{}}
    def add(self, number, ids, tokens):
        self._running[number] = (ids[0], tokens)
    def step(self):
        print("a library's chatter")
        found = []
        for number, (first, left) in list(self._running.items()):
            if first == 13:
                raise RuntimeError("unlucky")
            found.append((number, [first], left == 1))
            self._running[number] = (first, left - 1)
            if left == 1:
                del self._running[number]
        return found

import json, pathlib
from bench._peer_engines.loops import open_channel, send, serve
channel = open_channel()
setup = json.loads(pathlib.Path(sys.argv[1]).read_text())
if setup.get("refuses"):
    send(channel, {{"refused": "no such weights"}})
else:
    serve(Echo(setup), setup, channel)
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
    return {"task": "serve", "tokens": 3, "ends": [9], "threads": 1, "prompts": prompts}


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


def test_what_a_peer_refuses_is_told_in_its_sentence(program: list[str], tmp_path: Path):
    refused = pytest.raises(PeerFailed, match=r"^echo: no such weights$")
    with Peer(program, setup_for() | {"refuses": True}, tmp_path, "echo") as peer, refused:
        peer.ready()


def test_a_peer_that_is_not_there_is_told(tmp_path: Path):
    command = [sys.executable, "-c", "import no_such_engine"]
    with Peer(command, setup_for(), tmp_path, "nobody") as peer, pytest.raises(PeerFailed, match="no_such"):
        peer.ready()


def test_never_more_requests_together_than_the_batch():
    class Counting:
        version = ""

        def __init__(self) -> None:
            self.running: dict[int, tuple[int, int]] = {}
            self.most = 0

        def add(self, number: int, ids: list[int], tokens: int) -> None:
            self.running[number] = (ids[1], ids[0])
            self.most = max(self.most, len(self.running))

        def step(self) -> list[Progress]:
            now = self.running
            self.running = {n: (name, left - 1) for n, (name, left) in now.items() if left > 1}
            return [Progress(n, [name], left == 1) for n, (name, left) in now.items()]

    engine = Counting()
    answer = generate(engine, [[3, 50], [1, 51], [2, 52], [5, 53], [1, 54]], 2, 9)
    assert engine.most == 2
    assert answer["outputs"] == [[50] * 3, [51], [52] * 2, [53] * 5, [54]]
    assert generate(engine, [[1, 60]], 2, 9)["outputs"] == [[60]], "numbers of requests are not used again"


class Slow:
    """An engine that computes one prompt in a step, and skips a request in the step numbered `skips`."""

    version = ""

    def __init__(self, skips: int = -1) -> None:
        self.prompts: list[tuple[int, int]] = []
        self.running: dict[int, int] = {}
        self.steps, self.skips = 0, skips

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        self.prompts.append((number, tokens))

    def step(self) -> list[Progress]:
        self.steps += 1
        if self.prompts:
            number, tokens = self.prompts.pop(0)
            self.running[number] = tokens
        served = list(self.running)[1 if self.steps == self.skips else 0 :]
        for number in served:
            self.running[number] -= 1
        found = [Progress(number, [7], not self.running[number]) for number in served]
        self.running = {number: left for number, left in self.running.items() if left}
        return found


def test_steps_are_measured_once_all_prompts_are_computed():
    engine = Slow()
    steps = Steps(engine, [[1], [2], [3], [4]], [5] * 10)
    steps.start({"batch": 3, "tokens": 20})
    assert engine.steps == 4, "three prompts, and a second token of the last"
    found = steps.decode({"steps": 5})
    assert found["tokens"] == 15
    assert engine.steps == 9
    steps.finish({})
    assert not engine.running
    assert steps.prefill({})["tokens"] == 10
    assert not engine.running


def test_a_step_in_which_a_request_gets_nothing_is_an_error_and_no_slow_result():
    steps = Steps(Slow(skips=4), [[1], [2]], [5])
    steps.start({"batch": 2, "tokens": 20})
    with pytest.raises(RuntimeError, match="9 tokens in place of 10: the batch was not full"):
        steps.decode({"steps": 5})


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
