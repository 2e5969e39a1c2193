"""Would the tests of the core notice a mistake? Plants one mistake at a time, and counts those that a test
finds.

    python -m tests.mutants --sample 60 --seed 1                       # of the whole core and laps_sd/contract/choose.py
    python -m tests.mutants --sample 20 scheduler_svc/core/rank.py     # of one file

Each mutant is one changed operator, constant, condition or a dropped statement in one function. The tests of
`tests/core` that call that function run on it until the first failure; one that takes three times the
processor time they usually take counts as found. Prints the survivors, the share that was found and its 95 %
interval (Wilson); the exit code is 1 if that share is below --least.

pytest collects once, in this process; each mutant is a child forked off it, in which the function gets other
code. So most cost milliseconds, no file is written, and the working tree may change during the run.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
PATIENCE = 3.0
LEAST_S = 5.0
"""Processor time that any mutant gets."""

Change = tuple[str, Callable[[ast.AST], None]]


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the possible changes of one node, and their names."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            yield "comparison", lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())  # type: ignore[attr-defined]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", lambda n: setattr(n, "op", ARITHMETIC[type(n.op)]())  # type: ignore[attr-defined]
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield "and/or", lambda n: setattr(n, "op", other())
        case ast.If() | ast.While() | ast.IfExp():
            yield (
                "condition negated",
                lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)),  # type: ignore[attr-defined]
            )
        case ast.Constant(value=bool()):
            yield "constant flipped", lambda n: setattr(n, "value", not n.value)  # type: ignore[attr-defined]
        case ast.Constant(value=int() | float()):
            yield "constant + 1", lambda n: setattr(n, "value", n.value + 1)  # type: ignore[attr-defined]
        case ast.Expr(value=ast.Call()):
            yield "call dropped", lambda n: setattr(n, "value", ast.Constant(None))
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "nothing returned", lambda n: setattr(n, "value", ast.Constant(None))


def bodies(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes that run inside functions; not annotations, defaults, assertions, or raised exceptions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            waiting: list[ast.AST] = list(function.body)
            while waiting:
                node = waiting.pop()
                if isinstance(node, ast.Assert | ast.Raise | ast.FunctionDef):
                    continue  # a function inside is met by itself
                yield node
                skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
                waiting += [child for child in ast.iter_child_nodes(node) if child is not skipped]


@dataclass(frozen=True)
class Mutant:
    """One mistake. `function` is the outermost function that holds it, named as Python does (`Class.method`)."""

    file: Path
    line: int
    what: str
    function: str
    code: CodeType

    def plant(self) -> None:
        """Put the mistake into the function, for the rest of this process."""
        holder: Any = importlib.import_module(module_name(self.file))
        *classes, name = self.function.split(".")
        for each in classes:
            holder = getattr(holder, each)
        found = vars(holder)[name]
        for inside in ("__func__", "fget", "func", "__wrapped__"):  # class methods, properties, caches
            found = getattr(found, inside, None) or found
        found.__code__ = self.code


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(code: CodeType) -> dict[str, CodeType]:
    """Return the outermost functions of a module, methods too, by name."""
    found = {}
    for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
        if "<" in inner.co_name:
            continue
        if inner.co_flags & 0x1:  # optimized: a function; otherwise the body of a class
            found[inner.co_qualname] = inner
        else:
            found |= functions(inner)
    return found


@dataclass(frozen=True)
class Spot:
    """A place for a mistake: the node of a file, by its place in `bodies`, and which of its `changes`."""

    file: Path
    node: int
    change: int


def spots(file: Path) -> list[Spot]:
    """Return all spots in one file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = enumerate(bodies(tree))
    return [Spot(file, number, which) for number, node in nodes for which, _ in enumerate(changes(node))]


def mutants(spot: Spot) -> Iterator[Mutant]:
    """Yield the mistake planted there; none where Python compiles it to the same code, or where it cannot be
    planted, because it removes the only use of a variable of a closure (such as `super()`).
    """
    text = spot.file.read_text(encoding="utf-8")
    tree, changed = ast.parse(text), ast.parse(text)
    node, twin = (list(bodies(each))[spot.node] for each in (tree, changed))
    name, change = list(changes(twin))[spot.change]
    change(twin)
    what = f"{name}: {ast.unparse(node).splitlines()[0]} -> {ast.unparse(twin).splitlines()[0]}"
    right, wrong = (
        functions(compile(each, str(spot.file), "exec", dont_inherit=True))
        for each in (tree, ast.fix_missing_locations(changed))
    )
    for function, code in wrong.items():
        if code != right[function] and code.co_freevars == right[function].co_freevars:
            yield Mutant(spot.file, getattr(node, "lineno", 0), what, function, code)


class Trials:
    """A pytest plugin: instead of one run of the collected tests, it runs them once for each mutant."""

    def __init__(self, chosen: Sequence[Mutant]) -> None:
        self.chosen = chosen
        self.survivors: list[Mutant] = []
        self.well = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants."""
        output, told = os.pipe()
        child = os.fork()
        if child == 0:
            report = json.dumps(self.usual(session)).encode()
            with os.fdopen(told, "wb") as stream:
                stream.write(report)
            os._exit(session.testsfailed)
        os.close(told)
        with os.fdopen(output, "rb") as stream:
            usual = json.loads(stream.read() or b"[]")
        self.well = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if not self.well:
            return True
        for number, mutant in enumerate(self.chosen):
            print(f"{number} of {len(self.chosen)} done", end="\r", file=sys.stderr, flush=True)
            key = f"{mutant.file}:{mutant.function}"
            callers = sorted((took_s, at) for at, (took_s, called) in enumerate(usual) if key in called)
            if self.survives(session, mutant, callers):
                self.survivors.append(mutant)
                print(f"survived: {mutant.file.relative_to(ROOT)}:{mutant.line} {mutant.what}", flush=True)
        return True

    def usual(self, session: pytest.Session) -> list[tuple[float, list[str]]]:
        """Return, for each test, the processor time it takes, s, and the functions it calls."""
        silence()
        wanted = {str(mutant.file) for mutant in self.chosen}
        called: set[CodeType] = set()

        # A trace function that returns None: calls of Python functions only, no lines, which costs little.
        def watch(frame: FrameType, _event: str, _: object) -> None:
            called.add(frame.f_code)

        found = []
        for item in session.items:
            called.clear()
            began_s = time_s()
            sys.settrace(watch)
            run(session, item)
            sys.settrace(None)
            names = {
                f"{code.co_filename}:{code.co_qualname.partition('.<locals>')[0]}"
                for code in called
                if code.co_filename in wanted
            }
            found.append((time_s() - began_s, sorted(names)))
        return found

    def survives(self, session: pytest.Session, mutant: Mutant, callers: Sequence[tuple[float, int]]) -> bool:
        """Return whether every test that calls the function passes with the mistake in it; quick ones run
        first.
        """
        child = os.fork()
        if child == 0:
            silence()
            limit_s = math.ceil(LEAST_S + PATIENCE * sum(took_s for took_s, _ in callers))
            resource.setrlimit(
                resource.RLIMIT_CPU, (limit_s + math.ceil(time_s()), limit_s + math.ceil(time_s()) + 1)
            )
            mutant.plant()
            for _, at in callers:
                run(session, session.items[at])
                if session.testsfailed:
                    os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run(session: pytest.Session, item: pytest.Item) -> None:
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def time_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wilson(found: int, of: int) -> tuple[float, float]:
    z, share = 1.96, found / of
    middle = share + z * z / (2 * of)
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - spread) / (1 + z * z / of), (middle + spread) / (1 + z * z / of)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "files", nargs="*", type=Path, help="files to mutate (default: the core and choose.py)"
    )
    parser.add_argument("--sample", type=int, default=60, help="mutants to try (default 60), 0: all")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--least", type=float, default=0.88, help="share that must be found (default 0.88)")
    parser.add_argument(
        "--quick", action="store_true", help="without tests/core/test_properties.py, the slowest of them"
    )
    options = parser.parse_args()
    core = [*sorted((ROOT / "scheduler_svc/core").rglob("*.py")), ROOT / "laps_sd/contract/choose.py"]
    files = [file.resolve() for file in options.files] or core
    all_spots = [spot for file in files for spot in spots(file)]
    total = len(all_spots)
    if options.sample:
        all_spots = random.Random(options.seed).sample(all_spots, min(options.sample, total))
    chosen = [mutant for spot in all_spots for mutant in mutants(spot)]

    # The same examples for every mutant, and none is made smaller: that it fails is all that counts.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
    del sys.modules["tests"]  # pytest imports it in its own way
    trials = Trials(chosen)
    settings = ("addopts=--strict-markers --import-mode=importlib", "timeout=0")
    arguments = [
        "-s",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        str(ROOT / "tests/core"),
    ]
    if options.quick:
        arguments.append(f"--ignore={ROOT / 'tests/core/test_properties.py'}")
    pytest.main([*(word for setting in settings for word in ("-o", setting)), *arguments], plugins=[trials])
    if not trials.well:
        print("tests/core fails without any mutant", file=sys.stderr)
        return 2
    found = len(chosen) - len(trials.survivors)
    low, high = wilson(found, len(chosen))
    print(
        f"{found} of {len(chosen)} mutants found, {found / len(chosen):.1%} [{low:.1%}, {high:.1%}]; {total} in all"
    )
    return 1 if found / len(chosen) < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
