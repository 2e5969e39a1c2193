"""Bodies of chat completions and completions, as the messages that all protocols share.

Fields that the engine supports are used; fields that merely label a request are accepted and ignored; every
other field is refused by name, unless its value requests nothing (`null`, `store: false`, `n: 1` …). An
answer never silently leaves out a requested feature.

The models check only shapes, and numbers of items against the largest possible settings; bounds are those of
`gateway.calls.validation`, which gets the same message from every protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.api.openai.body import Json
from gateway.api.openai.field_errors import validated
from gateway.api.openai.models import (
    SAMPLING_FIELDS,
    Body,
    ChatBody,
    CompletionBody,
    Message,
    StreamOptions,
)
from gateway.api.openai.output_formats import read_format
from gateway.api.openai.tools import set_tools, tool_call_message
from gateway.api.openai.unknown_fields import OnUnknown, Unsupported, check_fields, refuse
from gateway.calls.validation import choices_of
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2

__all__ = [
    "CONVERSATION_FIELDS",
    "IGNORED_FIELDS",
    "Kind",
    "ParsedRequest",
    "put_messages",
    "read_chat",
    "read_completion",
]

Kind = Literal["chat", "text"]

UNSUPPORTED_FIELDS: Unsupported = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "prompt_embeds": ([],),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    # The tokenizers of language models put no spaces between special tokens.
    "spaces_between_special_tokens": (False, True),
    "store": (False,),
    # Each event has what has arrived.
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that the engine does not support (some of them only in completions of text), with the values
(besides null) that do not request them."""

REASONS: Mapping[str, str] = {
    "guided_decoding_backend": "formats are followed by llguidance here",
    "guided_whitespace_pattern": "the blanks between the parts of JSON are fixed",
    "truncate_prompt_tokens": "a prompt is never cut; send fewer tokens",
    "use_beam_search": "outputs are sampled; n makes several",
    "vllm_xargs": "workload_class and expected_output_tokens are fields of the body here",
}
"""The reasons why fields are not supported; the other fields have a common one."""

IGNORED_FIELDS = (
    "metadata",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
)
"""Fields that label a request and have no effect on it."""

CONVERSATION_FIELDS = ("prompt_cache_key", "session_id", "user")
"""Fields by which the turns of a conversation are recognised if `conversation` is not given: the first that
is a text, whatever its length. Other values have no effect."""

CONVERSIONS: Mapping[str, Callable[[int], int]] = {
    "seed": lambda seed: seed % 2**64,
    "top_k": lambda top_k: 0 if top_k == -1 else top_k,
}
"""Sampling parameters that have another value in the message: OpenAI's seeds are signed, and vLLM's top_k of
-1 for "all" is our 0."""

NAMES_IN_CHATS = (("logprobs", "top_logprobs"),)
"""The name in a chat of the field that holds the number of alternatives."""
NAMES_WITH_ECHO = (("prompt_logprobs", "logprobs"),)
"""The name in a completion with `echo` of the field that requests log probabilities of the prompt."""

ROLES = {"developer": "system"}
"""Roles that a template has under another name."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The parsed content of a body."""

    kind: Kind
    requests: Sequence[inference_pb2.GenerateRequest]
    """One request per prompt; they differ only in the prompt."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    format_field: str
    """The field that has the output format; empty without one."""
    include_reasoning: bool
    echo: bool
    """The text begins with the prompt; in a chat with an assistant's last message."""
    echo_only: bool
    """The answer has nothing but the prompt. One token is generated all the same, since it comes with the log
    probabilities of the prompt, and left out."""
    return_token_ids: bool
    prompt_logprobs: int | None
    """Alternatives of each token in the field of this name; None: it is not wanted."""
    names: Sequence[tuple[str, str]]
    """Beginnings of names of fields, with those of the API whose body this was; see
    `fields_of_chats.renamed`."""
    tokens_as_ids: bool
    """Log probabilities name tokens by their ids."""

    @property
    def has_scores(self) -> bool:
        """Return whether the answer has log probabilities, of the output or of the prompt."""
        return any(one.HasField("logprobs") or one.HasField("prompt_logprobs") for one in self.requests)

    @property
    def choices_per_prompt(self) -> int:
        """Return the number of outputs for each prompt."""
        return choices_of(self.requests[0])


def read_chat(body: Json, on_unknown: OnUnknown = refuse) -> ParsedRequest:
    """Parse the body of a chat completion. Raises InvalidArgument."""
    chat = validated(ChatBody, body)
    format_field, output_format = read_format(chat)
    request = _common(chat, output_format, body)
    if chat.logprobs:
        request.logprobs = chat.top_logprobs or 0
    elif chat.top_logprobs:
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    if chat.max_completion_tokens is not None:
        request.sampling.max_tokens = chat.max_completion_tokens
    put_messages(request, chat.messages, chat.add_generation_prompt, chat.continue_final_message)
    set_tools(request.messages, chat)
    _check_other_fields(body, ChatBody, on_unknown)
    return _parsed(
        "chat",
        chat,
        [request],
        format_field,
        names=NAMES_IN_CHATS,
        include_reasoning=chat.include_reasoning is not False,
    )


def read_completion(body: Json, on_unknown: OnUnknown = refuse) -> ParsedRequest:
    """Parse the body of a completion of text or token ids; each of several prompts becomes a request. Raises
    InvalidArgument."""
    completion = validated(CompletionBody, body)
    format_field, output_format = read_format(completion)
    request = _common(completion, output_format, body)
    if completion.logprobs is not None:
        request.logprobs = completion.logprobs
        if completion.echo:
            request.prompt_logprobs = max(completion.logprobs, request.prompt_logprobs)
    if completion.max_tokens == 0:
        if not completion.echo:
            raise InvalidArgument("max_tokens", "must be at least 1; 0 needs echo: true")
        request.sampling.max_tokens = 1
    requests = []
    for prompt in _prompts(completion.prompt):
        one = inference_pb2.GenerateRequest()
        one.CopyFrom(request)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.ids.extend(prompt)
        requests.append(one)
    _check_other_fields(body, CompletionBody, on_unknown)
    by_echo = completion.echo and completion.prompt_logprobs is None
    return _parsed(
        "text",
        completion,
        requests,
        format_field,
        names=NAMES_WITH_ECHO if by_echo else (),
        echo_only=completion.max_tokens == 0,
    )


def _prompts(prompt: str | list[int] | list[str | list[int]]) -> Sequence[str | list[int]]:
    """Return each prompt of a body."""
    if isinstance(prompt, str):
        return [prompt]
    # The model has checked that all items are as the first.
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _parsed(
    kind: Kind,
    body: Body,
    requests: Sequence[inference_pb2.GenerateRequest],
    format_field: str,
    *,
    names: Sequence[tuple[str, str]],
    include_reasoning: bool = True,
    echo_only: bool = False,
) -> ParsedRequest:
    options = body.stream_options or StreamOptions()
    return ParsedRequest(
        kind,
        requests,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        format_field=format_field,
        include_reasoning=include_reasoning,
        echo=bool(body.echo),
        echo_only=echo_only,
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        names=names,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _check_other_fields(body: Json, model: type[Body], on_unknown: OnUnknown) -> None:
    """Raise InvalidArgument for fields that would change the answer and are not supported."""
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        raise InvalidArgument("stream_options", "needs stream: true")
    for name, value in options.items():
        if name not in StreamOptions.model_fields and value is not None and value is not False:
            raise InvalidArgument(f"stream_options.{name[:40]}", "is not known here; leave it out")
    count = body.get("n") or 1
    if body.get("best_of", count) not in (None, count):
        raise InvalidArgument("best_of", "must be n, the number of outputs, which are all returned")
    known = {*model.model_fields, *IGNORED_FIELDS, *CONVERSATION_FIELDS, "best_of"}
    check_fields(body, known, UNSUPPORTED_FIELDS, on_unknown, REASONS)


def _common(
    body: Body, output_format: inference_pb2.OutputFormat | None, raw: Json
) -> inference_pb2.GenerateRequest:
    """Return the fields that both endpoints have; absent fields stay absent."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidArgument("prompt_logprobs", "cannot be used with stream: true; echo with logprobs can")
    return inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=_sampling(body),
        priority=body.priority,
        time_limit_ms=body.time_limit_ms,
        deadline_unix_ms=body.deadline_unix_ms,
        expected_output_tokens=body.expected_output_tokens,
        workload_class=body.workload_class or "",
        conversation=body.conversation or _conversation(raw),
        cache_salt=body.cache_salt or "",
        n=body.n,
        output_format=output_format,
        add_special_tokens=body.add_special_tokens,
        prompt_logprobs=body.prompt_logprobs,
    )


def _conversation(body: Json) -> str:
    """Return a name of the conversation by OpenAI's fields; empty without any."""
    named = (body[name] for name in CONVERSATION_FIELDS if isinstance(body.get(name), str) and body[name])
    text = next(named, "")
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest() if text else ""


def _sampling(body: Body) -> inference_pb2.SamplingParams:
    values = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    for name, convert in CONVERSIONS.items():
        if name in values:
            values[name] = convert(values[name])
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [inference_pb2.TokenIds(ids=word) for word in values["bad_words_ids"]]
    return inference_pb2.SamplingParams(**values)


def put_messages(
    request: inference_pb2.GenerateRequest,
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> None:
    """Set the prompt of a request to the messages of a chat."""
    request.messages.SetInParent()
    request.messages.messages.extend(map(_message, messages))
    if add_generation_prompt is not None:
        request.messages.add_generation_prompt = add_generation_prompt
    request.messages.continue_final_message = bool(continue_final_message)


def _message(message: Message) -> inference_pb2.ChatMessage:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return inference_pb2.ChatMessage(
        role=ROLES.get(message.role, message.role),
        content=content or message.refusal or "",
        tool_calls=map(tool_call_message, message.tool_calls or ()),
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
