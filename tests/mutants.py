"""Would the tests of the core notice a mistake? Plants one mistake at a time, and counts those that a test finds.

    python -m tests.mutants --sample 60 --seed 1                       # of the whole core and laps_sd/choose.py
    python -m tests.mutants --sample 20 scheduler_svc/core/rank.py     # of one file

Each mutant is one changed operator, constant, condition or a dropped statement, in a copy of the tree; `tests/core` runs on it until
the first failure. One that takes three times as long as the tests usually do counts as found. Prints the survivors, the share that
was found and its 95 % interval (Wilson); the exit code is 1 if that share is below --least.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("laps_sd", "scheduler_svc", "tests", "pyproject.toml")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
PATIENCE = 3.0

Change = tuple[str, Callable[[ast.AST], None]]


def changes(node: ast.AST) -> Iterator[Change]:
    """What can be done to one node, and its name."""
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
    """Nodes that run inside functions; not annotations, defaults, assertions, or what is raised."""
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


def mutants(file: Path) -> list[tuple[Path, int, str, str]]:
    """File, line, name of the change and the changed source of every mutant."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = []
    for number, node in enumerate(bodies(tree)):
        for which, (name, _) in enumerate(changes(node)):
            changed = copy.deepcopy(tree)
            twin = list(bodies(changed))[number]
            list(changes(twin))[which][1](twin)
            source = ast.unparse(ast.fix_missing_locations(changed))
            found.append((file, getattr(node, "lineno", 0), name, source))
    return found


def passes(tree: Path, timeout_s: float | None) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        "tests/core",
    ]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return not subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=timeout_s
        ).returncode
    except subprocess.TimeoutExpired:
        return False


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
    parser.add_argument("--least", type=float, default=0.85, help="share that must be found (default 0.85)")
    options = parser.parse_args()
    core = [*sorted((ROOT / "scheduler_svc/core").rglob("*.py")), ROOT / "laps_sd/choose.py"]
    files = [file.resolve() for file in options.files] or core
    chosen = [mutant for file in files for mutant in mutants(file)]
    total = len(chosen)
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, total))

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            copied = shutil.copytree if source.is_dir() else shutil.copy
            copied(source, tree / name)
        began_s = time.monotonic()
        if not passes(tree, None):
            print("tests/core fails without any mutant", file=sys.stderr)
            return 2
        usual_s = time.monotonic() - began_s
        survivors = 0
        for number, (file, line, name, source) in enumerate(chosen):
            print(
                f"{number} of {len(chosen)} done, {survivors} survived", end="\r", file=sys.stderr, flush=True
            )
            target = tree / file.relative_to(ROOT)
            before = target.read_text(encoding="utf-8")
            target.write_text(source, encoding="utf-8")
            if passes(tree, PATIENCE * usual_s):
                survivors += 1
                print(f"survived: {file.relative_to(ROOT)}:{line} {name}", flush=True)
            target.write_text(before, encoding="utf-8")
    found = len(chosen) - survivors
    low, high = wilson(found, len(chosen))
    print(
        f"{found} of {len(chosen)} mutants found, {found / len(chosen):.1%} [{low:.1%}, {high:.1%}]; {total} in all"
    )
    return 1 if found / len(chosen) < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
