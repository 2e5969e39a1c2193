"""Clients of a gateway, blocking and asynchronous.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=50).text)
        for event in client.stream([{"role": "user", "content": "hi"}], temperature=0.7):
            if isinstance(event, Delta):
                print(event.text, end="")

A prompt is a text, chat messages, or token ids. Events are those of the public contract: `Accepted` first,
then `Delta`s, `Ended` last. If the server refuses a call, the client raises the matching error of
`laps_sd.errors`.

Leaving a stream before its end cancels its request, unless the caller gave an idempotency key or set `keep`:

    with client.stream("Once upon a time") as events:
        for event in events: ...                     # break, return, an error: the request is cancelled

A call that reaches no gateway, or whose error advises when to retry, is retried for `retry_s` with growing
pauses, at the next address if several were given. Every call may be repeated, since a request without an
idempotency key gets one. Once a request is accepted, a lost connection is repaired: the stream resumes at the
cursor of the last event, and the caller notices a pause.

With `n` outputs, their events arrive interleaved; `events.choice` is the index of the last event's output:

    events = client.stream("Once upon a time", n=3)
    for event in events:
        if isinstance(event, Delta):
            texts[events.choice] += event.text
"""

from laps_sd.client.aio import AsyncClient, AsyncStream
from laps_sd.client.blocking import Client, Stream
from laps_sd.client.failures import error_of
from laps_sd.client.repair import Event
from laps_sd.client.request import Options, Prompt, make_request
from laps_sd.service.wire import Tls
from laps_sd.v1.inference_pb2 import Accepted, Cursor, Delta, Ended, FinishReason, OutputFormat

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Cursor",
    "Delta",
    "Ended",
    "Event",
    "FinishReason",
    "Options",
    "OutputFormat",
    "Prompt",
    "Stream",
    "Tls",
    "error_of",
    "make_request",
]
