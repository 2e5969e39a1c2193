"""Every limit is named, with its field, by the refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from gateway.calls.bad_words import BadWords
from gateway.calls.completion import body_hash, complete
from gateway.calls.validation import check_request
from gateway.links.request_ids import shard_of
from gateway.model.files import ModelFiles
from gateway.settings import GatewaySettings
from laps_sd.errors import InvalidArgument
from laps_sd.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    OutputFormat,
    SamplingParams,
    Speculation,
    TokenIds,
)
from tests.services.gateway.conftest import CONTEXT

SETTINGS = GatewaySettings(
    model="tiny",
    max_prompt_characters=1000,
    max_messages=3,
    max_output_tokens=500,
    default_max_tokens=100,
    max_priority=5,
    max_logprobs=20,
)


def sampling(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="x", sampling=SamplingParams(**fields))


def output_format(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="x", output_format=OutputFormat(**fields))


def messages(*pairs: tuple[str, str]) -> GenerateRequest:
    return GenerateRequest(
        messages=ChatMessages(messages=[ChatMessage(role=role, content=content) for role, content in pairs])
    )


REFUSED: list[tuple[GenerateRequest, str, str]] = [
    (GenerateRequest(), "prompt", "one of text, messages, token_ids"),
    (GenerateRequest(text=""), "text", "empty"),
    (GenerateRequest(text="x" * 1001), "text", "at most 1000 characters"),
    (GenerateRequest(text="x", model="other"), "model", "'tiny'"),
    (messages(), "messages.messages", "empty"),
    (
        messages(("user", "a"), ("user", "b"), ("user", "c"), ("user", "d")),
        "messages.messages",
        "at most 3, got 4",
    ),
    (
        messages(("user", "a"), ("function", "b")),
        "messages.messages[1].role",
        "system, user, assistant, tool, got 'function'",
    ),
    (messages(("user", "")), "messages.messages", "with content"),
    (
        messages(("user", "a" * 600), ("user", "b" * 600)),
        "messages.messages",
        "at most 1000 characters in all, got 1200",
    ),
    (GenerateRequest(token_ids=TokenIds()), "token_ids.ids", "empty"),
    (GenerateRequest(token_ids=TokenIds(ids=[1, 320])), "token_ids.ids[1]", "from 0 to 319, got 320"),
    (sampling(max_tokens=0), "sampling.max_tokens", "from 1 to 500, got 0"),
    (sampling(max_tokens=501), "sampling.max_tokens", "from 1 to 500, got 501"),
    (sampling(temperature=-0.5), "sampling.temperature", "from 0 to 100, got -0.5"),
    (sampling(temperature=float("nan")), "sampling.temperature", "got nan"),
    (sampling(temperature=float("inf")), "sampling.temperature", "got inf"),
    (sampling(top_p=0), "sampling.top_p", "above 0 and at most 1, got 0"),
    (sampling(top_p=1.5), "sampling.top_p", "above 0 and at most 1, got 1.5"),
    (sampling(top_p=float("nan")), "sampling.top_p", "got nan"),
    (sampling(top_k=2**31), "sampling.top_k", "from 0 to 2147483647, got 2147483648"),
    (sampling(min_p=1.5), "sampling.min_p", "from 0 to 1, got 1.5"),
    (sampling(min_p=float("nan")), "sampling.min_p", "got nan"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "above 0 and at most 100, got 0"),
    (sampling(repetition_penalty=float("inf")), "sampling.repetition_penalty", "got inf"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty", "from -2 to 2, got 2.5"),
    (sampling(frequency_penalty=float("nan")), "sampling.frequency_penalty", "got nan"),
    (sampling(logit_bias={320: 1.0}), "sampling.logit_bias", "from 0 to 319, got 320"),
    (sampling(logit_bias={5: 100.5}), "sampling.logit_bias[5]", "from -100 to 100, got 100.5"),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias",
        "at most 1024 tokens, got 1025",
    ),
    (output_format(json_object=False), "output_format.json_object", "must be true"),
    (output_format(json_schema=""), "output_format.json_schema", "1 to 65536 characters, got 0"),
    (output_format(regex="a" * 65537), "output_format.regex", "got 65537"),
    (
        GenerateRequest(
            text="x", sampling=SamplingParams(ignore_eos=True), output_format=OutputFormat(regex="a")
        ),
        "sampling.ignore_eos",
        "absent or false with output_format",
    ),
    (GenerateRequest(text="x", speculation=Speculation(drafter=7)), "speculation.drafter", "got 7"),  # type: ignore[arg-type]
    (sampling(stop_token_ids=[1, 320]), "sampling.stop_token_ids[1]", "from 0 to 319, got 320"),
    (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "at most 64 token ids, got 65"),
    (sampling(allowed_token_ids=[320]), "sampling.allowed_token_ids[0]", "from 0 to 319, got 320"),
    (
        sampling(allowed_token_ids=[1] * 1025),
        "sampling.allowed_token_ids",
        "at most 1024 token ids, got 1025",
    ),
    (
        sampling(allowed_token_ids=[5, 6], bad_words_ids=[TokenIds(ids=[5]), TokenIds(ids=[6])]),
        "sampling.allowed_token_ids",
        "must hold a token that is no bad word",
    ),
    (sampling(bad_words=["x"] * 129), "sampling.bad_words", "at most 128 texts, got 129"),
    (sampling(bad_words=["x", " "]), "sampling.bad_words[1]", "1 to 64 characters that are not all blanks"),
    (sampling(bad_words=["x" * 65]), "sampling.bad_words[0]", "got 65"),
    (sampling(bad_words_ids=[TokenIds()]), "sampling.bad_words_ids[0]", "1 to 64 token ids, got 0"),
    (sampling(bad_words_ids=[TokenIds(ids=[320])]), "sampling.bad_words_ids[0][0]", "from 0 to 319"),
    (sampling(min_tokens=2**31), "sampling.min_tokens", "from 0 to 2147483647"),
    (sampling(stop=["x"] * 17), "sampling.stop", "at most 16 texts, got 17"),
    (sampling(stop=["x", ""]), "sampling.stop[1]", "1 to 256 characters, got 0"),
    (sampling(stop=["x" * 257]), "sampling.stop[0]", "1 to 256 characters, got 257"),
    (
        GenerateRequest(text="x", idempotency_key="k" * 129),
        "idempotency_key",
        "at most 128 characters, got 129",
    ),
    (GenerateRequest(text="x", idempotency_key="a\nb"), "idempotency_key", "printable"),
    (GenerateRequest(text="x", workload_class="c" * 65), "workload_class", "at most 64 characters, got 65"),
    (GenerateRequest(text="x", workload_class="a b"), "workload_class", "letters, digits"),
    (GenerateRequest(text="x", priority=6), "priority", "from -5 to 5, got 6"),
    (GenerateRequest(text="x", priority=-6), "priority", "from -5 to 5, got -6"),
    (GenerateRequest(text="x", time_limit_ms=0), "time_limit_ms", "from 1 to 86400000, got 0"),
    (GenerateRequest(text="x", time_limit_ms=86_400_001), "time_limit_ms", "from 1 to 86400000"),
    (GenerateRequest(text="x", expected_output_tokens=0), "expected_output_tokens", "at least 1"),
    (GenerateRequest(text="x", logprobs=21), "logprobs", "at most 20, got 21"),
    (GenerateRequest(text="x", prompt_logprobs=21), "prompt_logprobs", "at most 20, got 21"),
    (GenerateRequest(text="x", speculation=Speculation(mode=9)), "speculation.mode", "got 9"),  # type: ignore[arg-type]
    (
        GenerateRequest(text="x", speculation=Speculation(max_draft_tokens=65)),
        "speculation.max_draft_tokens",
        "at most 64, got 65",
    ),
    (
        GenerateRequest(text="x", speculation=Speculation(mode=Speculation.MODE_OFF, max_draft_tokens=2)),
        "speculation.max_draft_tokens",
        "MODE_OFF",
    ),
]


@pytest.mark.parametrize(
    ("request_", "field", "limit"), REFUSED, ids=[f"{field}: {limit}" for _, field, limit in REFUSED]
)
def test_a_refusal_names_field_and_limit(
    model: ModelFiles, request_: GenerateRequest, field: str, limit: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_request(request_, SETTINGS, model)

    ((named, description),) = refused.value.violations
    assert named == field
    assert limit in description


ACCEPTED = [
    GenerateRequest(text="x"),
    GenerateRequest(
        text="x", model="tiny", priority=5, time_limit_ms=1, logprobs=20, workload_class="a.b/c:d-e_f"
    ),
    messages(("system", ""), ("user", "hi")),
    GenerateRequest(token_ids=TokenIds(ids=[0, 319])),
    sampling(
        min_p=0.5, repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2, logit_bias={319: -100}
    ),
    output_format(json_object=True),
    output_format(json_schema='{"type": "object"}'),
    output_format(regex="[a-z]+"),
    output_format(grammar='start: "a"+'),
    GenerateRequest(text="x", speculation=Speculation(drafter=Speculation.DRAFTER_LOOKUP)),
    sampling(max_tokens=500, temperature=0, top_p=1, top_k=0, seed=2**64 - 1, stop=["x" * 256] * 16),
    GenerateRequest(text="x", speculation=Speculation(mode=Speculation.MODE_OFF, max_draft_tokens=0)),
    GenerateRequest(text="x", speculation=Speculation(mode=Speculation.MODE_AUTO, max_draft_tokens=64)),
    GenerateRequest(text="\x00", idempotency_key="k" * 128),
]


@pytest.mark.parametrize("request_", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_is_at_its_limit_passes(model: ModelFiles, request_: GenerateRequest) -> None:
    check_request(request_, SETTINGS, model)


def test_messages_need_a_template(model: ModelFiles) -> None:
    with pytest.raises(InvalidArgument, match="has no chat template"):
        check_request(messages(("user", "hi")), SETTINGS, dataclasses.replace(model, template=None))


class TestTheContext:
    @pytest.fixture
    def completed(self, model: ModelFiles) -> Callable[..., Any]:
        def run(
            request: GenerateRequest,
            prompt_tokens: int,
            settings: GatewaySettings = SETTINGS,
            capacity_tokens: int | None = None,
        ) -> Any:
            return complete(
                request,
                [70] * prompt_tokens,
                settings=settings,
                model=model,
                tenant="t",
                fallback_seed=9,
                capacity_tokens=capacity_tokens,
            )

        return run

    @pytest.mark.parametrize(
        ("default", "capacity_tokens", "max_tokens"),
        [
            (None, None, CONTEXT - 10),
            (20, None, 20),
            (CONTEXT, None, CONTEXT - 10),
            (None, CONTEXT - 5, CONTEXT - 15),
            (20, 25, 15),
            (None, 10, CONTEXT - 10),
            (None, 10 * CONTEXT, CONTEXT - 10),
        ],
    )
    def test_and_the_workers_bound_an_output_without_max_tokens(
        self,
        completed: Callable[..., Any],
        default: int | None,
        capacity_tokens: int | None,
        max_tokens: int,
    ) -> None:
        settings = dataclasses.replace(SETTINGS, default_max_tokens=default)
        submit = completed(GenerateRequest(text="x"), 10, settings, capacity_tokens)
        assert submit.specification.sampling.max_tokens == max_tokens

    def test_longest_output_without_max_tokens_is_the_longest_that_is_accepted(
        self, completed: Callable[..., Any]
    ) -> None:
        settings = dataclasses.replace(SETTINGS, default_max_tokens=None, max_output_tokens=30)
        submit = completed(GenerateRequest(text="x"), 10, settings)
        assert submit.specification.sampling.max_tokens == 30

    def test_workers_with_little_room_do_not_change_max_tokens(self, completed: Callable[..., Any]) -> None:
        submit = completed(sampling(max_tokens=100), 10, SETTINGS, 20)
        assert submit.specification.sampling.max_tokens == 100, "refused by the scheduler, with the reason"

    def test_the_default_length_grows_to_min_tokens(self, completed: Callable[..., Any]) -> None:
        request = sampling(min_tokens=150)
        assert completed(request, 5).specification.sampling.max_tokens == 150
        request.sampling.max_tokens = 149
        with pytest.raises(InvalidArgument, match=r"min_tokens must be at most max_tokens, 149, got 150"):
            completed(request, 5)
        with pytest.raises(InvalidArgument, match=f"must be at most max_tokens, 50, got {CONTEXT}"):
            completed(sampling(min_tokens=CONTEXT), CONTEXT - 50)

    def test_leaves_room_for_one_token(self, completed: Callable[..., Any]) -> None:
        assert completed(GenerateRequest(text="x"), CONTEXT - 1).specification.sampling.max_tokens == 1
        with pytest.raises(
            InvalidArgument, match=f"text must be at most {CONTEXT - 1} tokens.*got {CONTEXT}"
        ):
            completed(GenerateRequest(text="x"), CONTEXT)

    def test_bounds_max_tokens(self, completed: Callable[..., Any]) -> None:
        left = CONTEXT - 10
        assert completed(sampling(max_tokens=left), 10).specification.sampling.max_tokens == left
        with pytest.raises(
            InvalidArgument, match=f"sampling.max_tokens must be at most {left} after a prompt of 10"
        ):
            completed(sampling(max_tokens=left + 1), 10)

    def test_bounds_the_default(self, completed: Callable[..., Any]) -> None:
        assert completed(GenerateRequest(text="x"), 10).specification.sampling.max_tokens == 100
        assert completed(GenerateRequest(text="x"), CONTEXT - 20).specification.sampling.max_tokens == 20

    def test_needs_a_prompt(self, completed: Callable[..., Any]) -> None:
        with pytest.raises(InvalidArgument, match="text must make at least one token"):
            completed(GenerateRequest(text="x"), 0)


def test_the_seed_of_the_client_wins_even_when_it_is_zero(model: ModelFiles) -> None:
    for request, seed in ((sampling(seed=0), 0), (GenerateRequest(text="x"), 9)):
        submit = complete(request, [1], settings=SETTINGS, model=model, tenant="t", fallback_seed=9)
        assert submit.specification.sampling.seed == seed


class TestBodyHash:
    def test_is_of_the_body_as_it_was_sent(self) -> None:
        plain = GenerateRequest(text="x")

        assert body_hash(plain) == body_hash(GenerateRequest(text="x", idempotency_key="k"))
        assert body_hash(plain) == body_hash(GenerateRequest(text="x", deadline_unix_ms=1_800_000_000_000))
        assert len(body_hash(plain)) == 32
        for other in (
            GenerateRequest(text="y"),
            GenerateRequest(text="x", priority=0),
            GenerateRequest(text="x", keep=True),
            GenerateRequest(text="x", time_limit_ms=1000),
            sampling(temperature=1),
        ):
            assert body_hash(other) != body_hash(plain)

    def test_leaves_the_request_alone(self) -> None:
        request = GenerateRequest(text="x", idempotency_key="k")
        body_hash(request)

        assert request.idempotency_key == "k"


def test_the_shard_is_the_beginning_of_the_id() -> None:
    assert shard_of("s0.abc") == "s0"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scheduler_seeds": ()}, "LAPS_SD_SCHEDULER_SEEDS"),
        ({"scheduler_seeds": ("nowhere",)}, "host:port"),
        ({"shard": "a.b"}, "LAPS_SD_SHARD"),
        ({"shard": "größe"}, "LAPS_SD_SHARD"),
        ({"shard": "a" * 64}, "LAPS_SD_SHARD"),
        ({"shard": "_a"}, "LAPS_SD_SHARD"),
        ({"cors_origins": ("https://app.example/",)}, "LAPS_SD_CORS_ORIGINS"),
        ({"heartbeat_s": 1.1}, "LAPS_SD_HEARTBEAT_S must be at most 1.0"),
        ({"silence_s": 1.4}, "LAPS_SD_SILENCE_S must be at least 1.5"),
        ({"backoff_min_s": 3.0}, "LAPS_SD_BACKOFF_MAX_S"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        GatewaySettings(**changes)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_refused_where_nobody_gives_them(model: ModelFiles, field: str) -> None:
    request = GenerateRequest(text="x")
    setattr(request, field, 0)
    with pytest.raises(InvalidArgument, match=f"^{field} must be absent: this gateway gives no"):
        check_request(request, GatewaySettings(model="tiny", max_logprobs=None), model)


def test_options_reach_the_worker(model: ModelFiles) -> None:
    request = GenerateRequest(
        text="x",
        sampling=SamplingParams(
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={5: 2.0},
        ),
        output_format=OutputFormat(regex="a+"),
        speculation=Speculation(drafter=Speculation.DRAFTER_LOOKUP),
        logprobs=2,
        prompt_logprobs=3,
    )

    found = complete(
        request, [1, 2], settings=SETTINGS, model=model, tenant="t", fallback_seed=1
    ).specification

    sampling = found.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: 2.0}
    assert found.output_format.regex == "a+"
    assert found.drafter == Speculation.DRAFTER_LOOKUP
    assert (found.logprobs, found.prompt_logprobs) == (2, 3)


def test_bad_words_reach_the_worker_as_token_ids(model: ModelFiles) -> None:
    """At the beginning of a text and after a blank, each once."""
    given = SamplingParams(bad_words=["hello", "quick brown"], bad_words_ids=[TokenIds(ids=[7])])
    found = complete(
        GenerateRequest(text="x", sampling=given),
        [1, 2],
        settings=SETTINGS,
        model=model,
        tenant="t",
        fallback_seed=1,
    ).specification.sampling

    assert not found.bad_words
    words = [list(word.ids) for word in found.bad_words_ids]
    texts = ["hello", " hello", "quick brown", " quick brown"]
    assert words == [[7], *(model.encode_rendered(text) for text in texts)]
    assert BadWords(model).sequences_of(["lo", "zlo"]) == BadWords(model).sequences_of(["lo"]), (
        "a sequence that ends in another one is left out"
    )
    many = SamplingParams(bad_words=["\u20ac" * 60])
    with pytest.raises(InvalidArgument, match="bad_words must be texts of at most 64 tokens, got"):
        complete(
            GenerateRequest(text="x", sampling=many),
            [1],
            settings=SETTINGS,
            model=model,
            tenant="t",
            fallback_seed=1,
        )
