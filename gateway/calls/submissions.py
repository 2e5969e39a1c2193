"""The submissions of a call: one for each output of each request, with its prompt as token ids and its
format."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from copy import deepcopy

from gateway.calls.bad_words import BadWords
from gateway.calls.completion import complete
from gateway.calls.output_format import output_format_of
from gateway.calls.prompts import Prompts
from gateway.calls.validation import check_prompt_logprobs, choices_of
from gateway.model.files import ModelFiles
from gateway.model.formats import FormatJudge
from gateway.model.reasoning import State
from gateway.settings import GatewaySettings
from laps_sd.contract.limits import prompt_logprobs_in_all
from laps_sd.contract.prompt_blocks import name_blocks
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

__all__ = ["Submissions"]


class Submissions:
    """Makes the submissions of all calls of a gateway from their checked requests."""

    def __init__(self, settings: GatewaySettings, model: ModelFiles, prompts: Prompts) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._formats = FormatJudge()

    async def close(self) -> None:
        """End the process that checks formats."""
        await self._formats.close()

    async def of(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        tenant: str,
        traceparent: str,
        *,
        reads_markup: bool,
        capacity_tokens: int | None,
    ) -> tuple[list[link_pb2.Submit], list[State | None]]:
        """Return all submissions of a call, and where the output of each begins if its reasoning will be
        read. Raises before any of them is submitted. `capacity_tokens`: see `complete`."""
        made: list[link_pb2.Submit] = []
        states: list[State | None] = []
        of_prompts = 0
        bad_words = BadWords(self._model)
        for request in requests:
            rendered = await self._prompts.rendered(request, tenant)
            markers = self._model.dialect.reasoning
            state = markers.state_after(rendered) if markers and rendered and reads_markup else None
            grammar = await self._grammar_of(request, state, tenant)
            prompt_ids = await self._prompts.ids_of(request, rendered, tenant)
            if wants_prompt := request.HasField("prompt_logprobs"):
                each = prompt_logprobs_in_all(len(prompt_ids), request.prompt_logprobs)
                of_prompts += choices_of(request) * each
                check_prompt_logprobs(of_prompts, self._settings)
            submit = complete(
                request,
                prompt_ids,
                settings=self._settings,
                model=self._model,
                tenant=tenant,
                fallback_seed=secrets.randbits(64),
                capacity_tokens=capacity_tokens,
                bad_words=bad_words,
                reads_markup=reads_markup,
            )
            if grammar is not None:
                submit.specification.output_format.CopyFrom(grammar)
            submit.traceparent = traceparent
            submit.length_features.extend(self._prompts.features_of(request))
            # A prompt whose log probabilities are wanted is computed again, whatever a worker has of it.
            if not wants_prompt:
                submit.prompt_blocks = name_blocks(prompt_ids, submit.specification.cache_salt)
            for output in _outputs_of(submit, choices_of(request)):
                output.idempotency_key = _key_of(request.idempotency_key, output=len(made))
                made.append(output)
                states.append(state)
        return made, states

    async def _grammar_of(
        self, request: inference_pb2.GenerateRequest, state: State | None, tenant: str
    ) -> inference_pb2.OutputFormat | None:
        """Return the grammar that the tools and the reasoning of a request make; None if its own output format is
        enough. Raises InvalidArgument if no worker could compile the one that holds."""
        await self._check_format(request.output_format, tenant)
        made = output_format_of(request, self._model, state)
        if made is None:
            return None
        judged = output_format_of(request, self._model, state, judged=True)
        assert judged is not None, "the tokenizer does not matter"
        await self._check_format(judged, tenant, field="messages.tools" if request.messages.tools else "")
        return made

    async def _check_format(
        self, wanted: inference_pb2.OutputFormat, tenant: str, *, field: str = ""
    ) -> None:
        """Raise InvalidArgument if no worker could compile the output format; it names the field if one is
        given."""
        kind = wanted.WhichOneof("format")
        if kind is None or kind == "json_object":
            return
        problem = await self._formats.problem_of(kind, getattr(wanted, kind), tenant=tenant)
        if problem:
            raise InvalidArgument(field or f"output_format.{kind}", problem)


def _outputs_of(submit: link_pb2.Submit, count: int) -> list[link_pb2.Submit]:
    """Return the submission of each output of a request. Each is a request of its own, whose seed is increased by the
    output's number (our choice); the first equals the request with n = 1."""
    outputs = [submit, *(deepcopy(submit) for _ in range(1, count))]
    for number, output in enumerate(outputs):
        sampling = output.specification.sampling
        sampling.seed = (sampling.seed + number) % 2**64
    return outputs


def _key_of(key: str, *, output: int) -> str:
    """Return the idempotency key of one output of a call. A client's key never contains a line feed, so no
    key made here equals a client's key."""
    return f"{key}\n{output}" if key and output else key
