"""The mistakes: where a file can have one, which, and the code of the function that has it."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[2]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
REACHED = "statement_of_a_mutant_reached"

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
class Spot:
    """A place for a mistake: the node of a file, by its place in `bodies`, and which of its `changes`."""

    file: Path
    node: int
    change: int


@dataclass(frozen=True)
class Mutant:
    """One mistake. `code` is that of the outermost function that holds it."""

    spot: Spot
    line: int
    what: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.spot.file.relative_to(ROOT)}:{self.line} {self.what}"

    def plant(self) -> None:
        """Put the mistake into the function, for the rest of this process."""
        replace(self.spot.file, self.code)


def spots(file: Path) -> list[Spot]:
    """Return all spots in one file."""
    nodes = enumerate(bodies(parsed(file)))
    return [Spot(file, number, which) for number, node in nodes for which, _ in enumerate(changes(node))]


def mutants(spot: Spot) -> Iterator[Mutant]:
    """Yield the mistake planted there; none where Python compiles it to the same code, or where it cannot be
    planted, because it removes the only use of a variable of a closure (such as `super()`).
    """
    tree, changed = parsed(spot.file), parsed(spot.file)
    node, twin = (list(bodies(each))[spot.node] for each in (tree, changed))
    name, change = list(changes(twin))[spot.change]
    change(twin)
    what = f"{name}: {ast.unparse(node).splitlines()[0]} -> {ast.unparse(twin).splitlines()[0]}"
    right, wrong = functions(tree, spot.file), functions(changed, spot.file)
    for function, code in wrong.items():
        if code != right[function] and code.co_freevars == right[function].co_freevars:
            yield Mutant(spot, getattr(node, "lineno", 0), what, code)


def watch(chosen: Sequence[Mutant]) -> set[int]:
    """Return a set to which, for the rest of this process, the number of each chosen mutant is added whenever
    the statement that it changes is about to run.
    """
    reached: set[int] = set()
    setattr(builtins, REACHED, reached.add)
    for file in {mutant.spot.file for mutant in chosen}:
        tree = parsed(file)
        nodes = list(bodies(tree))
        parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for number, mutant in enumerate(chosen):
            if mutant.spot.file == file:
                node = nodes[mutant.spot.node]
                while not isinstance(node, ast.stmt):
                    node = parents[id(node)]
                block = next(
                    value
                    for _, value in ast.iter_fields(parents[id(node)])
                    if isinstance(value, list) and any(each is node for each in value)
                )
                at = next(at for at, each in enumerate(block) if each is node)
                block.insert(at, ast.parse(f"{REACHED}({number})").body[0])
        watched = functions(tree, file)
        for function in {(m.code.co_qualname, m.code.co_firstlineno) for m in chosen if m.spot.file == file}:
            replace(file, watched[function])
    return reached


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.Module, file: Path) -> dict[tuple[str, int], CodeType]:
    """Return the outermost functions of a module, methods too, by name and first line: a property and its
    setter have one name.
    """
    found = {}
    waiting = [compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)]
    while waiting:
        for inner in (const for const in waiting.pop().co_consts if isinstance(const, CodeType)):
            if "<" in inner.co_name:
                continue
            if inner.co_flags & 0x1:  # optimized: a function; otherwise the body of a class
                found[inner.co_qualname, inner.co_firstlineno] = inner
            else:
                waiting.append(inner)
    return found


def replace(file: Path, code: CodeType) -> None:
    """Give the function of that name and first line other code."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    holder: Any = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    *classes, name = code.co_qualname.split(".")
    for each in classes:
        holder = getattr(holder, each)
    found = vars(holder)[name]
    inside = [getattr(found, each, None) for each in ("__func__", "fget", "fset", "func", "__wrapped__")]
    function = next(
        each
        for each in (found, *inside)
        if each is not None
        and hasattr(each, "__code__")
        and each.__code__.co_firstlineno == code.co_firstlineno
    )
    function.__code__ = code
