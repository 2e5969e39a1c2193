"""How well are output lengths predicted from prompts? `laps-sd bench lengths`

Each stream of recorded answers (of one model, or `--by source`, or `--by file`) passes through the scheduler's estimates: a request
is estimated at its arrival, and learned from when eight more have arrived. Three estimators take the same requests in the same order:

    class      the lengths of earlier requests alone, as without any hint
    scratch    learned from the prompts of this stream alone
    warm       the same, beside the start weights that the scheduler ships

*tau* is Kendall's rank correlation of estimate and length, *rms* the root mean square of ln(length / middle of the interval), *cover*
the share of lengths inside the 80 % interval. *after* 100: of the requests from the 101st to the 300th, and so on. With several seeds
(orders), figures are means.

The data is JSON lines: rows with `model`, `prompt`, `output_tokens`; or with `hashed` (CRC-32 of words and pairs, 15 bits) and
`output_tokens` by model. Your own logs need no more than the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.report import command_line, finish, kendall_tau, progress, table
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.start_weights import start_weights
from simulator.lengths import RecordedAnswer, read_answers
from simulator.traces import TraceError

ESTIMATORS = ("class", "scratch", "warm")
AFTER = (0, 30, 100, 300, 1000, 3000)
UNLIMITED = 1_000_000
FEWEST = 150
"""Answers without which a stream is left out."""
LAG = 8
"""Requests in flight."""
MOST = 4000
"""Requests of a stream at most."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("lengths", __doc__)
    parser.add_argument(
        "--data", type=Path, action="append", required=True, help="file of answers; may be repeated"
    )
    parser.add_argument(
        "--by",
        choices=("model", "source", "file"),
        default="model",
        help="what makes a stream (default: model)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="orders of each stream (default 3)")
    return parser.parse_args(argv)


def streams_of(files: Sequence[Path], by: str) -> dict[str, list[RecordedAnswer]]:
    """Return the answers of each stream that is long enough."""
    found: dict[str, list[RecordedAnswer]] = defaultdict(list)
    for file in files:
        for answer in read_answers(file):
            name = {"model": answer.model, "source": answer.source, "file": file.name}[by]
            found[name].append(answer)
    return {name: answers for name, answers in found.items() if len(answers) >= FEWEST}


@dataclasses.dataclass(frozen=True, slots=True)
class Estimated:
    """The estimate of one request at its arrival, and its length."""

    length: int
    middle: float
    low: float
    high: float

    @property
    def covered(self) -> bool:
        """Return whether the interval holds the length; lengths are whole."""
        return math.floor(self.low) <= self.length <= math.ceil(self.high)


def estimates(
    answers: Sequence[RecordedAnswer], estimator: str, cpu_s: list[float] | None = None
) -> Iterator[Estimated]:
    """Yield the estimate of each request, learning from it `LAG` requests later. `cpu_s` receives what the
    prediction of each and learning from it took.
    """
    prompts = PromptLengths(*start_weights()) if estimator == "warm" else PromptLengths()
    priors = Priors(prompts)
    flying: list[tuple[RecordedAnswer, Guesses]] = []
    for answer in answers:
        features = b"" if estimator == "class" else answer.features
        began_s = time.process_time()
        guesses = Guesses(prompt=prompts.predict(features, "", ""))
        left = priors.tokens_left("", 0, UNLIMITED, guesses)
        flying.append((answer, guesses))
        if len(flying) > LAG:
            ended, guessed = flying.pop(0)
            priors.observe_length("", ended.output_tokens, guessed)
            if estimator != "class":
                prompts.learn(ended.features, "", "", ended.output_tokens, cut=False)
        if cpu_s is not None:
            cpu_s.append(time.process_time() - began_s)
        yield Estimated(answer.output_tokens, math.sqrt(left.low * left.high), left.low, left.high)


def figures(found: Sequence[Estimated]) -> dict[str, float]:
    """Return tau, rms and coverage of these requests."""
    return {
        "tau": kendall_tau([each.middle for each in found], [each.length for each in found]),
        "rms": math.sqrt(statistics.fmean(math.log(each.length / each.middle) ** 2 for each in found)),
        "cover": statistics.fmean(each.covered for each in found),
    }


def rows_of(
    name: str, answers: Sequence[RecordedAnswer], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each estimator and window of one stream."""
    cpu_s: list[float] = []
    windows: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    counts: dict[int, int] = {}
    for seed in range(1, options.seeds + 1):
        order = list(answers)
        random.Random(seed).shuffle(order)
        order = order[:MOST]
        for estimator in ESTIMATORS:
            found = list(estimates(order, estimator, cpu_s if estimator == "warm" else None))
            for after, until in pairwise((*AFTER, len(order))):
                window = found[after:until]
                if len(window) >= min(60, until - after) and len(window) > 1:
                    counts[after] = len(window)
                    windows[estimator, after].append(figures(window))
    spread = statistics.pstdev(math.log(answer.output_tokens) for answer in answers)
    for (estimator, after), each in windows.items():
        yield {
            "stream": name,
            "spread": round(spread, 2),
            "estimator": estimator,
            "after": after,
            "requests": counts[after],
            **{key: round(statistics.fmean(one[key] for one in each), 3) for key in each[0]},
        }
    progress(
        f"  {name}: {1e6 * statistics.median(cpu_s):.0f} µs of CPU for each request, all estimates included"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    options = arguments(argv)
    try:
        streams = streams_of(options.data, options.by)
    except (OSError, TraceError) as error:
        print(f"laps-sd bench lengths: {error}", file=sys.stderr)
        return 2
    if not streams:
        print(f"laps-sd bench lengths: no stream has {FEWEST} answers", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for name, answers in sorted(streams.items(), key=lambda item: -len(item[1])):
        progress(f"{name}: {len(answers)} answers")
        rows += rows_of(name, answers, options)
    means = [
        {
            "estimator": estimator,
            "after": after,
            "streams": len(each),
            **{key: round(statistics.fmean(row[key] for row in each), 3) for key in ("tau", "rms", "cover")},
        }
        for estimator in ESTIMATORS
        for after in AFTER
        if (each := [row for row in rows if (row["estimator"], row["after"]) == (estimator, after)])
    ]
    table("Each stream", rows, width=100)
    if len(streams) > 1:
        table("Mean of the streams", means)
    return finish(
        [*rows, *({"stream": "mean", **row} for row in means)],
        about={"data": [str(file) for file in options.data], "by": options.by, "seeds": options.seeds},
        json_file=options.json,
        summary=f"{len(streams)} streams, {options.seeds} orders each",
        met=None,
    )


if __name__ == "__main__":
    sys.exit(main())
