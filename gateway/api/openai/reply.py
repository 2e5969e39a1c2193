"""Answers in OpenAI's JSON: whole, in chunks of server-sent events, and the list of models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from gateway.api.ends import OPENAI, openai_reason
from gateway.api.openai.body import Json
from gateway.api.openai.echo import echo_of
from gateway.api.openai.errors import error_json
from gateway.api.openai.logprobs import OutputLogprobs, TokenNames
from gateway.api.openai.message import MessageReader, readers_of, reason_with_calls
from gateway.api.openai.prompt_logprobs import vllm_json
from gateway.api.openai.request import ParsedRequest
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from gateway.model.files import ModelFiles
from gateway.usage import cached_tokens
from laps_sd.contract.acceptance import mean_acceptance_length
from laps_sd.contract.ends import End
from laps_sd.errors import LapsSdError
from laps_sd.service.ends import end_of_reason
from laps_sd.v1 import inference_pb2

__all__ = ["COMPACT", "DONE", "Reply", "model_json", "models_json", "sse"]

DONE = b"data: [DONE]\n\n"

COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""How events are written. Its `encode` of a text alone is one call of C."""


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: OutputLogprobs | None = None
    """Log probabilities that have not been sent; None: they are not wanted."""
    end: inference_pb2.Ended | None = None
    reason: str = ""
    """OpenAI's reason of the end."""
    reader: MessageReader | None = None
    """Reads calls of tools and reasoning; None: the text is the content."""
    around_text: tuple[str, str] | None = None
    """The event of a text, before and after the text; made for the first one."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens that have not been sent, if they are wanted."""
    last_token: int = -1
    stop: str = ""
    """The stop string that ended it."""
    of_prompt: inference_pb2.PromptLogprobs | None = None
    """Log probabilities of the prompt."""
    begins_with_prompt: bool = False
    """The next log probabilities to be sent are those of the prompt, and its text if it is a stream."""


class Reply:
    """One answer: as server-sent events (`opening`, `events`, `closing`), or whole (`add` every piece, then
    `whole`)."""

    def __init__(
        self,
        parsed: ParsedRequest,
        generation: Generation,
        *,
        created_unix_s: int,
        model: ModelFiles,
    ) -> None:
        accepted = generation.accepted
        self._parsed = parsed
        self._names = TokenNames(model, as_ids=parsed.tokens_as_ids)
        self._chat = parsed.kind == "chat"
        self._has_logprobs = parsed.requests[0].HasField("logprobs")
        self._keeps_tokens = parsed.return_token_ids or bool(parsed.requests[0].sampling.stop_token_ids)
        self._model = accepted[0].model
        self._created = created_unix_s
        self._prompt_tokens = sum(one.prompt_tokens for one in accepted[:: parsed.choices_per_prompt])
        self._completion_tokens = 0
        readers = readers_of(parsed, generation, model)
        # Both begin with the prompt, and come together.
        begins_with_prompt = parsed.echo and not self._chat and self._has_logprobs
        self._choices = [
            _Choice(
                reader=reader,
                begins_with_prompt=begins_with_prompt,
                logprobs=OutputLogprobs(self._names, model) if self._has_logprobs else None,
            )
            for reader in readers
        ]
        self._prompts = generation.prompts
        self._echoes = [""] * len(accepted)
        if parsed.echo:
            requests = [request for request in parsed.requests for _ in range(parsed.choices_per_prompt)]
            self._echoes = [
                echo_of(request, prompt, model)
                for request, prompt in zip(requests, self._prompts, strict=True)
            ]
        self.id = accepted[0].request_id
        """Request id of the first choice; every other call of LAPS-SD accepts it."""

    def add(self, choice: int, piece: Piece) -> None:
        """Add a piece of a choice. Raises the failure of a failed choice."""
        self._add_output(choice, piece)
        reader = self._choices[choice].reader
        if reader is not None:
            reader.deltas(piece.text, piece.token_ids, over=piece.end is not None)
        if piece.end is not None:
            self._add_end(choice, piece.end)

    def _add_output(self, choice: int, piece: Piece) -> None:
        kept = self._choices[choice]
        if piece.prompt_logprobs is not None:
            kept.of_prompt = piece.prompt_logprobs
        if self._parsed.echo_only:
            return
        self._completion_tokens += len(piece.token_ids)
        if kept.logprobs is not None:
            kept.logprobs.add(piece.token_ids, piece.logprobs)
        if self._keeps_tokens and piece.token_ids:
            kept.last_token = piece.token_ids[-1]
            if self._parsed.return_token_ids:
                kept.token_ids.extend(piece.token_ids)
        if piece.end is not None:
            kept.stop = piece.stop
        if not self._parsed.stream:
            kept.texts.append(piece.text)

    def _add_end(self, choice: int, ended: inference_pb2.Ended) -> None:
        self._choices[choice].reason = openai_reason(ended)
        self._choices[choice].end = ended
        for each in self._choices:  # the end changes the usage that they show
            each.around_text = None

    def whole(self) -> Json:
        """Return the answer of a call without stream; every choice has ended."""
        choices = []
        for index, choice in enumerate(self._choices):
            text = self._echoes[index] + "".join(choice.texts)
            content: Json = {"text": text}
            if self._chat:
                plain = {"role": "assistant", "content": text}
                content = {"message": plain if choice.reader is None else choice.reader.message()}
                if choice.reader is not None and self._echoes[index]:
                    read = content["message"]
                    read["content"] = self._echoes[index] + (read["content"] or "")
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(index),
                    "finish_reason": self._finish(choice),
                    "stop_reason": self._stop_reason(choice),
                    **self._token_ids(choice),
                    **(self._of_prompt(index) if not self._chat else {}),
                }
            )
        return {
            **self._envelope("chat.completion" if self._chat else "text_completion"),
            **(self._of_prompt(0) if self._chat else {}),
            "choices": choices,
            "usage": self._usage(),
            "metrics": self._metrics(),
        }

    def opening(self) -> bytes:
        """Return the events before any output has arrived."""
        parts = []
        for index, echo in enumerate(self._echoes):
            if self._chat:
                first: Json = {"delta": {"role": "assistant", "content": echo}}
                parts.append(sse(self._chunk(index, first, None) | self._prompt_ids(index)))
            elif (echo or self._parsed.return_token_ids) and not self._choices[index].begins_with_prompt:
                parts.append(sse(self._chunk(index, {"text": echo} | self._prompt_ids(index), None)))
        return b"".join(parts)

    def events(self, choice: int, piece: Piece) -> bytes:
        """Return the events of a piece, and add it. Raises the failure of a failed choice; then the piece has
        no events."""
        events = self._prompt_event(choice, piece)
        self._add_output(choice, piece)
        reader = self._choices[choice].reader
        if reader is not None:
            deltas = reader.deltas(piece.text, piece.token_ids, over=piece.end is not None)
            events += b"".join(self._delta_event(choice, delta) for delta in deltas)
        elif piece.text and not self._parsed.echo_only:
            events += self._text_event(choice, piece.text)
        if piece.end is not None:
            self._add_end(choice, piece.end)
            last: Json = {"delta": {}} if self._chat else {"text": ""}
            events += sse(self._chunk(choice, last, self._finish(self._choices[choice])))
        return events

    def _prompt_event(self, index: int, piece: Piece) -> bytes:
        """Return the event with the prompt and its log probabilities, before the first output."""
        choice = self._choices[index]
        if not choice.begins_with_prompt or not (piece.token_ids or piece.end):
            return b""
        choice.of_prompt = piece.prompt_logprobs
        return sse(self._chunk(index, {"text": self._echoes[index]} | self._prompt_ids(index), None))

    def closing(self) -> bytes:
        """Return the last events: usage if it was requested, and the mark of the end."""
        if not self._parsed.include_usage:
            return DONE
        last = {
            **self._envelope("chat.completion.chunk" if self._chat else "text_completion"),
            "choices": [],
            "usage": self._usage(),
            "metrics": self._metrics(),
        }
        return sse(last) + DONE

    def failure(self, error: LapsSdError) -> bytes:
        """Return the last events of an answer that fails."""
        return sse(error_json(error)) + DONE

    def _delta_event(self, index: int, delta: Json) -> bytes:
        """Return the event of a delta of a message."""
        if "content" in delta and not self._parsed.continuous_usage:
            return self._text_event(index, delta["content"])
        return sse(self._chunk(index, {"delta": delta}, None))

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event of a text: most of what a gateway sends. Only the text and the usage change from
        one to the next, so the rest is made once; `_chunk` describes what results."""
        if self._has_logprobs or self._parsed.return_token_ids:
            return sse(self._chunk(index, self._content(text), None))
        choice = self._choices[index]
        if choice.around_text is None:
            choice.around_text = self._around_text(index)
        before, after = choice.around_text
        if self._parsed.continuous_usage:
            after %= (self._completion_tokens, self._prompt_tokens + self._completion_tokens)
        return f"{before}{COMPACT.encode(text)}{after}".encode()

    def _around_text(self, index: int) -> tuple[str, str]:
        """Return the event of a text, before the text and after it; with continuous usage, the latter is a
        format for the completion and the total tokens."""
        chunk = self._chunk(index, self._content(""), None)
        if self._parsed.continuous_usage:
            chunk["usage"] |= {"completion_tokens": "%d", "total_tokens": "%d"}
        # The last empty text is that of the content: what follows it is the same in every answer.
        before, after = sse(chunk).decode().rsplit('""', 1)
        return before, after.replace('"%d"', "%d")

    def _content(self, text: str) -> Json:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _chunk(self, index: int, content: Json, finish_reason: str | None) -> Json:
        chunk = {
            **self._envelope("chat.completion.chunk" if self._chat else "text_completion"),
            "choices": [
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(index),
                    "finish_reason": finish_reason,
                    **self._ending(self._choices[index]),
                    **self._token_ids(self._choices[index]),
                }
            ],
        }
        if self._parsed.include_usage:
            chunk["usage"] = self._usage() if self._parsed.continuous_usage else None
        return chunk

    def _ending(self, choice: _Choice) -> Json:
        return {} if choice.end is None else {"stop_reason": self._stop_reason(choice)}

    def _finish(self, choice: _Choice) -> str | None:
        assert choice.end is not None, "only what has ended has a reason"
        if self._parsed.echo_only:
            return OPENAI[End.LENGTH]
        return reason_with_calls(choice.reason, choice.reader)

    def _stop_reason(self, choice: _Choice) -> str | int | None:
        """Return vLLM's `stop_reason`: the stop string or the stop token that ended an output."""
        assert choice.end is not None, "only what has ended has a reason"
        match end_of_reason(choice.end.finish_reason):
            case _ if self._parsed.echo_only:
                return None
            case End.STOP_SEQUENCE:
                return choice.stop or None
            case End.STOP if choice.last_token in self._parsed.requests[0].sampling.stop_token_ids:
                return choice.last_token
        return None

    def _token_ids(self, choice: _Choice) -> Json:
        """Return the tokens that have not been sent, if they are wanted."""
        if not self._parsed.return_token_ids:
            return {}
        ids, choice.token_ids = choice.token_ids, []
        return {"token_ids": ids}

    def _prompt_ids(self, index: int) -> Json:
        return {"prompt_token_ids": list(self._prompts[index])} if self._parsed.return_token_ids else {}

    def _of_prompt(self, index: int) -> Json:
        """Return the fields of a prompt that are wanted."""
        most, found = self._parsed.prompt_logprobs, self._choices[index].of_prompt
        if most is None:
            return self._prompt_ids(index)
        entries = None if found is None else vllm_json(found, self._prompts[index], most, self._names.decoded)
        return self._prompt_ids(index) | {"prompt_logprobs": entries}

    def _logprobs(self, index: int) -> Json | None:
        """Return the log probabilities that have not been sent; None if there are none."""
        choice = self._choices[index]
        if choice.logprobs is None:
            return None
        if self._chat:
            return choice.logprobs.in_chat()
        before = self._logprobs_of_prompt(index, choice.logprobs)
        of_output = choice.logprobs.in_completion()
        return {name: before[name] + values for name, values in of_output.items()} if before else of_output

    def _logprobs_of_prompt(self, index: int, logprobs: OutputLogprobs) -> Json:
        """Return the log probabilities of the prompt, once, if those of a choice begin with them."""
        choice = self._choices[index]
        if not choice.begins_with_prompt:
            return {}
        choice.begins_with_prompt = False
        if choice.of_prompt is None:
            return {}  # it ended before its first token
        most = self._parsed.requests[0].logprobs
        return logprobs.of_prompt(choice.of_prompt, self._prompts[index], self._echoes[index], most)

    def _envelope(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self) -> Json:
        cached = cached_tokens([choice.end for choice in self._choices], self._parsed.choices_per_prompt)
        usage: Json = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        readers = [choice.reader for choice in self._choices if choice.reader is not None]
        if readers:
            reasoning = sum(reader.reasoning_tokens for reader in readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _metrics(self) -> Json:
        """Return the speculation metrics under vLLM's names, and the times, which vLLM does not have."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        drafts = sum(end.speculation.drafts for end in ends)
        drafted = sum(end.speculation.drafted for end in ends)
        accepted = sum(end.speculation.accepted for end in ends)
        metrics: Json = {
            "speculative_decoding": {
                "mean_acceptance_length": mean_acceptance_length(accepted, drafts),
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "num_spec_steps": drafts,
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
            }
        }
        if len(ends) == 1:
            timing = ends[0].timing
            metrics["timing"] = {
                "queued_s": timing.queued_s,
                "first_token_s": timing.first_token_s,
                "total_s": timing.total_s,
                "preemptions": timing.preemptions,
            }
        return metrics


def sse(value: Json) -> bytes:
    """Return one server-sent event."""
    return f"data: {COMPACT.encode(value)}\n\n".encode()


def models_json(model: ModelFiles, created_unix_s: int) -> Json:
    """Return the list of models: an entry for each name."""
    return {"object": "list", "data": [model_json(model, created_unix_s, name) for name in model.names]}


def model_json(model: ModelFiles, created_unix_s: int, name: str) -> Json:
    """Return the entry of one name of the model. That of an adapter has its model, as vLLM's has."""
    parent = {"parent": model.name} if model.adapter_of(name) else {}
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "laps-sd",
        "max_model_len": model.context_tokens,
        **parent,
    }
