"""Sampling parameters are one message from client to worker, and the engine's settings have its fields."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

from gateway.api.open_inference import NO_PARAMETERS, TAKEN
from gateway.api.openai.models import ChatBody, CompletionBody
from gateway.api.openai.request import read_completion
from laps_sd.client.request import SamplingOptions, make_request
from laps_sd.contract.choose import Residency
from laps_sd.contract.sampling import BOUNDS, Sampling
from laps_sd.v1.gateway_link_pb2 import Specification, Submit
from laps_sd.v1.inference_pb2 import SamplingParams, TokenIds
from scheduler_svc.wire.gateway_messages import submission_of
from scheduler_svc.wire.requests import new_request
from worker_svc.link.wire import held_requests, specification
from worker_svc.runner.messages import HeldRequest

NAMES = {field.name for field in SamplingParams.DESCRIPTOR.fields}
EVERYTHING = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_p=0.75,
    top_k=5,
    seed=2**64 - 1,
    stop=["a", "b"],
    ignore_eos=True,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias={9: -1.0, 3: 2.0},
    min_tokens=3,
    stop_token_ids=[8, 6],
    bad_words=["c"],
    bad_words_ids=[TokenIds(ids=[4, 5]), TokenIds(ids=[7])],
    allowed_token_ids=[1, 2],
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)
OF_THE_GATEWAY = {"bad_words"}
"""Parameters that a gateway turns into others."""
OF_THE_SPECIFICATION = {
    "max_tokens",
    "stop",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
}
"""Those that end an output or make text of it, and choose no tokens."""


WITH_IDS_ONLY = SamplingParams()
"""The same without the fields that no worker gets."""
WITH_IDS_ONLY.CopyFrom(EVERYTHING)
WITH_IDS_ONLY.ClearField("bad_words")


def test_the_example_has_every_field() -> None:
    assert {field.name for field, _ in EVERYTHING.ListFields()} == NAMES


def test_the_engine_has_every_parameter_that_chooses_tokens() -> None:
    assert {field.name for field in fields(Sampling)} == NAMES - OF_THE_SPECIFICATION - OF_THE_GATEWAY


def test_every_number_of_the_engine_has_bounds() -> None:
    numbers = {name for name, hint in get_type_hints(Sampling).items() if hint in (int, float)}
    assert BOUNDS.keys() == numbers
    for name, bounds in BOUNDS.items():
        assert getattr(Sampling(), name) in bounds


def test_every_protocol_has_every_parameter() -> None:
    assert get_type_hints(SamplingOptions).keys() == NAMES
    assert ChatBody.model_fields.keys() >= NAMES
    assert CompletionBody.model_fields.keys() >= NAMES
    assert set(TAKEN) >= NAMES.difference(NO_PARAMETERS)
    for name in NAMES:
        assert [part for part in get_args(ChatBody.model_fields[name].annotation) if part is not type(None)]


def test_a_body_and_the_options_of_a_client_make_the_same_message() -> None:
    values = {name: getattr(EVERYTHING, name) for name in NAMES}
    values |= {"stop": ["a", "b"], "logit_bias": {9: -1.0, 3: 2.0}}
    values |= {"bad_words": ["c"], "bad_words_ids": [[4, 5], [7]]}
    values |= {"stop_token_ids": [8, 6], "allowed_token_ids": [1, 2]}
    body = values | {"prompt": "x", "logit_bias": {"9": -1.0, "3": 2.0}}

    assert read_completion(body).requests[0].sampling == EVERYTHING
    assert make_request("x", **values).sampling == EVERYTHING


def test_parameters_of_a_body_that_are_absent_stay_absent() -> None:
    body = {"prompt": "x", "temperature": None, "top_k": -1}
    assert read_completion(body).requests[0].sampling == SamplingParams(top_k=0)


def test_a_worker_gives_back_what_it_got() -> None:
    engine = specification(Specification(request_id="r", prompt_ids=[1], sampling=EVERYTHING))
    assert engine.sampling.logit_bias == ((3, 2.0), (9, -1.0))
    assert engine.sampling.bad_words_ids == ((4, 5), (7,))
    assert engine.sampling.allowed_token_ids == (1, 2)
    assert engine.stop_token_ids == (8, 6)
    assert (engine.include_stop_str_in_output, engine.skip_special_tokens) == (True, False)
    for name in BOUNDS:
        assert getattr(engine.sampling, name) == getattr(EVERYTHING, name)
    assert (engine.max_tokens, engine.stop, engine.ignore_eos) == (7, ("a", "b"), True)

    held = HeldRequest(spec=engine, lease_epoch=1, residency=Residency.NONE, output_ids=(), acknowledged=0)
    (offered,) = held_requests([held])
    assert offered.specification.sampling == WITH_IDS_ONLY


def test_the_record_has_what_was_checked() -> None:
    wire = Specification(request_id="r", prompt_ids=[1], sampling=EVERYTHING)
    new = new_request(submission_of(Submit(request_id="r", specification=wire)), 0)

    assert Specification.FromString(new.submission).sampling == EVERYTHING
    assert (new.seed, new.max_tokens) == (2**64 - 1, 7)


def test_options_of_a_client_set_the_ends_of_its_prompt() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = make_request(
        chat, add_special_tokens=True, add_generation_prompt=False, continue_final_message=True
    )
    assert made.add_special_tokens
    assert made.messages.HasField("add_generation_prompt")
    assert not made.messages.add_generation_prompt
    assert made.messages.continue_final_message
    plain = make_request(chat)
    assert not plain.HasField("add_special_tokens")
    assert not plain.messages.HasField("add_generation_prompt")
