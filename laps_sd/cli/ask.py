"""Options of a request, and the request made of them: shared by `generate` and `chat`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from laps_sd.client import Client
from laps_sd.v1 import inference_pb2 as pb

LIST_TIMEOUT_S = 10.0

REQUEST, SAMPLING, SCHEDULING = "Request", "Sampling", "Scheduling and speculation"
"""Titles of the groups of options in --help."""

MAX_COUNT = 2**32 - 1
"""Largest number that a count of tokens of a request holds (uint32)."""
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 2**31 - 1
MAX_TIME_S = float(MAX_COUNT // 1000)
"""Longest time limit, which a request holds in milliseconds (uint32): 49 days. Also of a deadline, since gRPC takes
one that is far too long as one that has passed.
"""


@contextlib.contextmanager
def only_utf8() -> Iterator[None]:
    """Raise BadParameter for a text that is read or put into a request within, and is not UTF-8."""
    try:
        yield
    except UnicodeError:
        raise typer.BadParameter("the prompt and the options must be UTF-8") from None


ModelOption = Annotated[
    str, typer.Option(help="Model name; empty: the gateway's only model.", rich_help_panel=REQUEST)
]
SystemOption = Annotated[
    str | None,
    typer.Option(help="System message before the prompt.", show_default=False, rich_help_panel=REQUEST),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_COUNT,
        help="Maximum number of output tokens (default: the model's or the gateway's).",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Sampling temperature; 0 is greedy (default: the model's, else 1).",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Nucleus sampling (default: the model's, else 1, off).",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_COUNT,
        help="Sample among this many most likely tokens (default: the model's, else 0, off).",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_SEED,
        help="Random seed; the same seed gives the same text (default: chosen by the server).",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        help="String that ends the text; may be repeated.", show_default=False, rich_help_panel=SAMPLING
    ),
]
PriorityOption = Annotated[
    int | None,
    typer.Option(
        min=-MAX_PRIORITY - 1,
        max=MAX_PRIORITY,
        help="Higher runs first (default: 0).",
        show_default=False,
        rich_help_panel=SCHEDULING,
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=MAX_TIME_S,
        help="Soft limit: generation stops after this many seconds, and the text so far is the answer (none).",
        show_default=False,
        rich_help_panel=SCHEDULING,
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=MAX_TIME_S,
        help="Hard deadline of the call in seconds (none).",
        show_default=False,
        rich_help_panel=SCHEDULING,
    ),
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_COUNT,
        help="Maximum draft tokens per round; 0: no speculation.",
        show_default=False,
        rich_help_panel=SCHEDULING,
    ),
]
ClassOption = Annotated[
    str,
    typer.Option(
        "--class",
        help="Workload class; requests of one class share their estimates.",
        rich_help_panel=SCHEDULING,
    ),
]


def make_request(
    *,
    model: str,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
    priority: int | None,
    time_limit: float | None,
    draft_tokens: int | None,
    workload_class: str,
) -> pb.GenerateRequest:
    """Return a request without its prompt."""
    made = pb.GenerateRequest(
        model=model,
        sampling=pb.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop or [],
        ),
        priority=priority,
        time_limit_ms=None if time_limit is None else max(1, round(time_limit * 1000)),
        workload_class=workload_class,
    )
    if draft_tokens == 0:
        made.speculation.mode = pb.Speculation.MODE_OFF
    elif draft_tokens is not None:
        made.speculation.max_draft_tokens = draft_tokens
    return made


def models(client: Client, name: str) -> list[pb.Model]:
    """Return the models of that name, or all of them if it is empty."""
    return [model for model in client.models(timeout_s=LIST_TIMEOUT_S) if name in ("", model.name)]


def has_template(client: Client, name: str) -> bool:
    """Return whether a model of that name takes chat messages."""
    return any(model.has_chat_template for model in models(client, name))
