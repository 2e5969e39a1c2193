"""Descriptions of workloads: classes of requests, a predictor, arrivals.

A description consists of a few small dataclasses, written as tables in a regime file
(`bench/regimes/*.toml`). Every assumption of the evidence that is not recorded data is stated here or there;
all of them are our choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of a number of tokens. One of the kinds: lognormal (`median`, `sigma`), constant
    (`value`), column (of a CSV `file`), quantiles (`column` of a ServeGen `file`), code (characters of the
    `code` field of a JSON-lines `file`), answers (recorded answers with their prompts, `simulator.lengths`; none is
    drawn again before all were; the prompt is as long as recorded).
    """

    kind: str = "lognormal"
    median: float = 150.0
    sigma: float = 1.0
    value: int = 0
    file: str = ""
    column: str = ""
    models: tuple[str, ...] = ()
    """Models whose answers are drawn; empty: all. The same holds for `sources`."""
    sources: tuple[str, ...] = ()
    times: float = 1.0
    """Factor of the drawn value."""
    most: int = 2048
    """Upper limit; longer values are cut to it."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceModel:
    """Distribution of the tokens per round. `process`: each request has its own acceptance per draft token ~
    Beta(`mean`, `concentration`), which starts `drift` (standard deviation) away from it, returns within
    `settle_rounds`, and is disturbed by AR(1) noise; a round accepts a geometric number of tokens, at most
    the draft length. `recorded`: replays the rounds of recorded requests, cut at the draft length, and starts
    them again from the beginning if they are too short.
    """

    kind: str = "process"
    mean: float = 0.68
    concentration: float = 8.0
    drift: float = 0.10
    settle_rounds: float = 20.0
    noise: float = 0.06
    noise_keeps: float = 0.8
    file: str = ""
    runs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Recorded categories to use; empty: all. The same holds for `runs` and `tasks`."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One class of requests."""

    name: str = ""
    share: float = 1.0
    prompt: Lengths = Lengths()
    output: Lengths = Lengths()
    acceptance: AcceptanceModel = AcceptanceModel()


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Prediction of the output length at arrival. `noisy`: truth × exp(sigma · z). `inverse`: pivot² / truth
    × exp(sigma · z), which is high where the truth is low. `constant`: always `value`. `recorded`: the joint
    sample of true length and predicted class in `file`; the prediction is the median length of the class, and
    for a kind with output lengths of its own it is wrong by the factor of a recorded pair. `none`: no
    prediction. `prompt`: none from the client; the core gets the hashed words of each recorded prompt, and
    predicts. `shuffled`: the same with the words of another prompt.
    `short`: the same with the words of one of the prompts with the shortest answers.
    """

    kind: str = "noisy"
    sigma: float = 0.3
    pivot: float = 150.0
    value: int = 1
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """Group of tenants with the same predictor. All tenants of a workload send equally many requests."""

    name: str
    count: int = 1
    predictor: Predictor = Predictor()
    kinds: tuple[str, ...] = ()
    """Names of the kinds that they send; empty: all."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Process of arrivals. `poisson`, `gamma` (with `cv`), `burst` (all at 0), or `trace` (times and lengths
    of `file`, a window of it, stretched so that the load holds, or as recorded where `load` is 0). Load =
    arrival rate × mean machine seconds of a request / workers; a worker that is n times as slow counts 1/n.
    """

    process: str = "poisson"
    load: float = 0.8
    speed: float = 1.0
    """Where `load` is 0: a factor of the recorded speed."""
    cv: float = 1.0
    file: str = ""
    every: int = 1
    """Sampling of a trace: one of `every` requests, a smaller service with the same course of the day."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations of several turns. The prompt of a kind of requests is then the message of a turn."""

    turns: float = 1.0
    """Mean number of turns; geometric."""
    think_s: float = 10.0
    """Mean time between the end of a turn and the next one; exponential."""
    kinds: int = 0
    """Sets of instructions that conversations begin with; each conversation has one of them."""
    instructions: Lengths = Lengths(kind="constant")
    document: Lengths = Lengths(kind="constant")
    """Further tokens of the first message of a conversation."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Description of a workload."""

    requests: int = 1500
    max_tokens: int = 2048
    kinds: tuple[Kind, ...] = (Kind(),)
    predictor: Predictor = Predictor()
    tenants: tuple[Tenants, ...] = ()
    """Groups of tenants; empty: one tenant without a name and with the predictions of `predictor`."""
    arrivals: Arrivals = Arrivals()
    conversations: Conversations | None = None
    """None: each request stands alone. Otherwise arrivals are those of conversations, and a turn arrives after the one
    before has ended."""
    learned: int = 0
    """Requests of the same kinds that the core has learned from before the first arrival."""
    classes: bool = True
    """Requests have the name of their kind as workload class; otherwise none."""


Described = TypeVar("Described")


def described(cls: Callable[..., Described], table: Mapping[str, Any], where: str) -> Described:
    """Build a dataclass from a table of a regime file. ValueError names the table and the unknown key."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise ValueError(f"{where}: there is no {key!r}; there are: {', '.join(sorted(hints))}")
        values[key] = _value(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):  # one that may be left out
        hint = get_args(hint)[0]
    if dataclasses.is_dataclass(hint):
        return described(hint, value, where)  # type: ignore[arg-type]
    if getattr(hint, "__origin__", None) is tuple:
        inner = hint.__args__[0]
        return tuple(_value(inner, each, f"{where}[{place}]") for place, each in enumerate(value))
    allowed = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}.get(hint)
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool)):
        raise ValueError(f"{where} must be a {hint.__name__}, not {value!r}")
    return value
