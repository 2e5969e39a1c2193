"""What `generate` and `chat` share: the options of a request, the request made of them, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import grpc
import typer

from laps_sd.client import ChannelClient
from laps_sd.errors import LapsSdError
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc

ModelOption = Annotated[str, typer.Option(help="Model name; empty: the gateway's only model.")]
SystemOption = Annotated[
    str | None, typer.Option(help="System message before the prompt.", show_default=False)
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Output tokens at most (default: the gateway's).", show_default=False),
]
TemperatureOption = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy (default: 1).", show_default=False)
]
TopPOption = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Nucleus (default: 1, off).", show_default=False)
]
TopKOption = Annotated[
    int | None, typer.Option(min=0, help="Most likely tokens only (default: 0, off).", show_default=False)
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, help="Same seed, same text (default: the server's).", show_default=False),
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="String that ends the text; may be repeated.", show_default=False)
]
PriorityOption = Annotated[
    int | None, typer.Option(help="Higher runs first (default: 0).", show_default=False)
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Seconds until generation stops with what exists (none).", show_default=False
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0.001, help="Hard deadline of the call, seconds (none).", show_default=False),
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(min=0, help="Draft tokens per round at most; 0: plain decoding.", show_default=False),
]
ClassOption = Annotated[
    str, typer.Option("--class", help="Kind of work; requests of a kind share estimates.")
]


def request(
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
    """A request without its prompt."""
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


def models(
    stub: inference_pb2_grpc.InferenceStub, model: str, credentials: tuple[tuple[str, str], ...]
) -> list[pb.Model]:
    """The models of that name; all, where none is named."""
    listed = stub.ListModels(pb.ListModelsRequest(), timeout=10, metadata=credentials).models
    return [each for each in listed if model in ("", each.name)]


def has_template(
    stub: inference_pb2_grpc.InferenceStub, model: str, credentials: tuple[tuple[str, str], ...]
) -> bool:
    """Whether the model takes chat messages."""
    return any(each.has_chat_template for each in models(stub, model, credentials))


class Answer:
    """The messages of a request as they come. Once it is accepted, a lost connection is repaired."""

    def __init__(
        self,
        channel: grpc.Channel,
        request: pb.GenerateRequest,
        *,
        timeout: float | None,
        credentials: tuple[tuple[str, str], ...],
    ) -> None:
        """`channel` is the caller's. Nothing is sent before the first message is read."""
        client = ChannelClient(channel, metadata=credentials, retry_s=0.0)
        self._events = client.send(request, timeout_s=timeout)

    def __iter__(self) -> Iterator[pb.GenerateEvent]:
        """Raises the grpc.RpcError that the call failed with; LapsSdError where there was none."""
        try:
            for event in self._events:
                match event:
                    case pb.Accepted():
                        yield pb.GenerateEvent(accepted=event)
                    case pb.Delta():
                        yield pb.GenerateEvent(delta=event)
                    case pb.Ended():
                        yield pb.GenerateEvent(end=event)
        except LapsSdError as error:
            if isinstance(error.__cause__, grpc.RpcError):
                raise error.__cause__ from None
            raise

    def cancel(self) -> None:
        """Give the answer up; no effect at its end."""
        self._events.close()
