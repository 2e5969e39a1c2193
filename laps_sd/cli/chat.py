"""`laps-sd chat`: a conversation. The history lives in this process; each turn is one request with all of it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import typer

from laps_sd.cli import ask, dial, generate
from laps_sd.cli.failures import with_next_step, within
from laps_sd.client import Stream
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.v1 import inference_pb2 as pb

PROMPT = "> "
HELP = "/reset clears the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."


def chat(
    url: dial.UrlOption = None,
    model: ask.ModelOption = "",
    system: ask.SystemOption = None,
    max_tokens: ask.MaxTokensOption = None,
    temperature: ask.TemperatureOption = None,
    top_p: ask.TopPOption = None,
    top_k: ask.TopKOption = None,
    seed: ask.SeedOption = None,
    stop: ask.StopOption = None,
    priority: ask.PriorityOption = None,
    time_limit: ask.TimeLimitOption = None,
    timeout: ask.TimeoutOption = None,
    draft_tokens: ask.DraftTokensOption = None,
    workload_class: ask.ClassOption = "",
    stats: Annotated[
        bool, typer.Option("--stats", help="After each answer, print statistics of speculation on stderr.")
    ] = False,
    api_key: dial.ApiKeyOption = None,
    tls_ca: dial.CaOption = None,
    tls_cert: dial.CertOption = None,
    tls_key: dial.KeyOption = None,
    tls_name: dial.TlsNameOption = "",
) -> None:
    """Chat with a model: /reset clears the history, /quit or Ctrl-D ends.

    Without a terminal, each line of stdin is a message.
    """
    with ask.only_utf8():
        template = ask.make_request(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            priority=priority,
            time_limit=time_limit,
            draft_tokens=draft_tokens,
            workload_class=workload_class,
        )
        if system is not None:
            template.messages.messages.add(role="system", content=system)
    interactive = sys.stdin.isatty()
    files = dial.tls_files(tls_ca, tls_cert, tls_key)
    with dial.client(url, files, name=tls_name, api_key=api_key) as client:
        models = ask.models(client, model)
        if models and not any(each.has_chat_template for each in models):
            raise StartupError(
                f"The model {models[0].name!r} has no chat template: `laps-sd generate --raw` takes plain text."
            )
        talk = Conversation(
            lambda request: client.send(request, timeout_s=timeout),
            template,
            stats=stats,
        )
        if interactive:
            print(HELP, file=sys.stderr)
        for line in _utf8(_typed_lines() if interactive else sys.stdin):
            if not _handle_line(talk, line.strip(), interactive=interactive, timeout=timeout):
                break


def _utf8(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines. Raise BadParameter at one that is not UTF-8."""
    with ask.only_utf8():
        for line in lines:
            line.encode()  # bytes that Python could not decode became surrogates, which have no encoding
            yield line


def _handle_line(talk: Conversation, line: str, *, interactive: bool, timeout: float | None) -> bool:
    """Run one line, a command or a message. Return False if the conversation ends."""
    if line == "/quit":
        return False
    if line == "/reset":
        talk.reset()
    elif re.fullmatch(r"/\w*", line):
        print(HELP, file=sys.stderr)
    elif line:
        try:
            with within(timeout):
                answered = talk.send(line)
        except LapsSdError as error:
            if not interactive:
                raise
            print(f"laps-sd: {with_next_step(error)}", file=sys.stderr)
            answered = True
        if not (answered or interactive):
            raise typer.Exit(1)
    return True


def _typed_lines() -> Iterator[str]:
    """Yield the lines typed at the terminal until Ctrl-D, with editing and history if Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what gives `input` an editor
    while True:
        try:
            if not sys.stdout.isatty():  # the answers go to a file; the prompt must not
                print(PROMPT, end="", file=sys.stderr, flush=True)
            yield input(PROMPT if sys.stdout.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)


class Conversation:
    """History of a conversation. A turn that failed is not part of it."""

    def __init__(
        self,
        stream: Callable[[pb.GenerateRequest], Stream],
        template: pb.GenerateRequest,
        *,
        stats: bool = False,
    ) -> None:
        self._stream = stream
        self._template = template
        self._stats = stats
        self.messages: list[pb.ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        """Delete all messages except the system message."""
        self.messages = list(self._template.messages.messages)

    def send(self, text: str) -> bool:
        """Send a message with the history and print the answer. Return False if the request failed.

        Ctrl-C stops the answer; the text so far becomes part of the history.
        """
        message = pb.ChatMessage(role="user", content=text)
        request = pb.GenerateRequest()
        request.CopyFrom(self._template)
        del request.messages.messages[:]
        request.messages.messages.extend([*self.messages, message])
        events = self._stream(request)
        answer: list[str] = []
        ended: pb.Ended | None = None
        try:
            for event in events:
                match event:
                    case pb.Delta():
                        answer.append(event.text)
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                    case pb.Ended():
                        ended = event
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            events.close()
            if answer or ended is not None:
                print(flush=True)
        failed = ended is not None and ended.finish_reason == pb.FINISH_REASON_ERROR
        if ended is not None and (self._stats or failed):
            print(generate.summary(ended), file=sys.stderr)
        # An answer that was stopped before its first word is not part of the history.
        if not failed and (answer or ended is not None):
            self.messages += [message, pb.ChatMessage(role="assistant", content="".join(answer))]
        return not failed
