"""The engine over vLLM: the contract of engines, and the same text in whatever order: on a CPU that of the torch
engine.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tokenizers import Tokenizer
from vllm.v1.request import RequestStatus

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from tests.services.worker.harness import Desk, entry
from tests.vllm.one_core import (
    DRAFT_LEN,
    ENVIRONMENT,
    ON_CPU,
    PAIR,
    OneCore,
    cpu_only,
    equal_arithmetic,
    like_torch,
    mixed,
)
from tests.worker.cached import Replica, prompt_of, split
from tests.worker.contract import EngineContract, Make, spec
from tests.worker.drive import Between, everybody, finish_all, rotate
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.interface import (
    DeviceFailed,
    FormatKind,
    ModelError,
    OutOfBlocks,
    OutputFormat,
    Sampling,
    Specification,
)
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.loading import load_core
from worker_svc.engine.vllm.parameters import TokenChooser

Texts = dict[str, list[int]]
pytestmark = pytest.mark.timeout(900)  # the first test loads the model, which is slow on a busy machine


@pytest.fixture(scope="module")
def one_core() -> Iterator[OneCore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield OneCore()


@pytest.fixture
def make(one_core: OneCore) -> Make:
    return one_core.engine


@pytest.fixture(scope="module")
def by_torch() -> Callable[[list[Specification]], Any]:
    """Return a function that runs requests on the torch engine with the same pair."""
    from worker_svc.engine.load import load_engine
    from worker_svc.engine.options import LoadOptions

    engine = load_engine(
        TARGET_DIR, DRAFT_DIR, LoadOptions(slots=20, max_length=512, max_draft_len=4, draft_len=4)
    )
    return lambda specs: finish_all(engine, specs)


class TestContract(EngineContract):
    """The contract of every engine."""

    draft_len = DRAFT_LEN
    draft_pool = False
    swaps = False
    budget_without_drafts = False


# -- the same text -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, one_core: OneCore) -> Texts:
    """Return the texts of the torch engine, or on a GPU those of all requests at once."""
    if ON_CPU:
        texts: Texts = request.getfixturevalue("by_torch")(mixed(20))[0]
        return texts
    return finish_all(one_core.engine(slots=20), mixed(20))[0]


@equal_arithmetic
@pytest.mark.parametrize(
    ("slots", "between"),
    [(20, everybody), (4, rotate("keep")), (4, rotate("evict"))],
    ids=["at once", "paused", "evicted"],
)
def test_the_text_is_the_expected_one_in_whatever_order(
    make: Make, expected: Texts, slots: int, between: Between
) -> None:
    texts, _, reports = finish_all(make(slots=slots), mixed(20), between)

    assert texts == expected
    assert sum(report.accepted for report in reports) > 100


@equal_arithmetic
def test_the_text_does_not_depend_on_drafts(make: Make, expected: Texts) -> None:
    plain = [replace(one, max_draft_len=0) for one in mixed(20)]
    texts, _, reports = finish_all(make(slots=20), plain)

    assert texts == expected
    assert not any(report.drafted for report in reports)


@equal_arithmetic
def test_a_request_goes_on_from_committed_tokens(make: Make, expected: Texts) -> None:
    """As after the crash of a worker."""
    later = [
        replace(one, committed_ids=tuple(expected[one.request_id][: 1 + at * 2]))
        for at, one in enumerate(mixed(20))
    ]
    texts, _, reports = finish_all(make(slots=20), later)

    assert texts == expected
    first = {report.request_id: report for report in reversed(reports)}
    assert all(first[one.request_id].position == len(one.committed_ids) for one in later)


PENALTIES = (
    Sampling(0.8, presence_penalty=1.5),
    Sampling(0.8, frequency_penalty=0.7),
    Sampling(repetition_penalty=1.5),
    Sampling(0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, logit_bias=((40, 2.0), (7, -100.0))),
    Sampling(logit_bias=((50, 3.0), (60, 3.0))),
)  # fmt: skip


@like_torch
def test_penalties_and_bias_count_all_output_also_after_a_resume(
    make: Make, by_torch: Callable[[list[Specification]], Any]
) -> None:
    specs = mixed(10, kinds=PENALTIES)
    expected = by_torch(specs)[0]
    later = [
        replace(one, committed_ids=tuple(expected[one.request_id][: 9 + at]))
        for at, one in enumerate(mixed(10, kinds=PENALTIES))
    ]

    assert finish_all(make(slots=10), specs)[0] == expected
    assert finish_all(make(slots=3), later, rotate("evict"))[0] == expected
    assert expected != by_torch(mixed(10, kinds=tuple(Sampling(k.temperature) for k in PENALTIES)))[0]


@like_torch
@pytest.mark.parametrize(
    ("options", "between"),
    [({}, everybody), ({"prefill_chunk": 8}, everybody), ({"prefill_chunk": 8, "slots": 2}, rotate("keep", 1)),
     ({"prefill_chunk": 8, "slots": 2}, rotate("evict"))],
    ids=["at once", "in chunks", "paused", "evicted"],
)  # fmt: skip
def test_log_probabilities_of_prompts_are_those_of_the_torch_engine(
    make: Make, by_torch: Any, options: dict[str, Any], between: Between
) -> None:
    """The second half finds the prompts of the first half in vLLM's prefix cache, and does not use it."""
    first = [replace(one, prompt_logprobs=at % 4) for at, one in enumerate(mixed(6, max_tokens=6))]
    specs = [replace(one, request_id=f"{half}{one.request_id}") for half in "ab" for one in first]
    found, expected = (
        {one.request_id: one for one in reports if one.prompt_logprobs is not None}
        for reports in (finish_all(make(**options), specs, between)[2], by_torch(specs)[2])
    )
    assert found.keys() == expected.keys() == {one.request_id for one in specs}
    for name, report in found.items():
        own, other = report.prompt_logprobs, expected[name].prompt_logprobs
        assert own is not None and other is not None and report.position == 0
        assert (own.alternatives, len(own.logprobs)) == (other.alternatives, len(other.logprobs))
        assert list(own.logprobs) == pytest.approx(list(other.logprobs), abs=1e-3)
        assert list(own.alternative_logprobs) == pytest.approx(list(other.alternative_logprobs), abs=1e-3)
        assert sum(a == b for a, b in zip(own.ranks, other.ranks, strict=True)) >= len(own.ranks) - 2


def test_a_prompt_of_one_token_has_an_empty_answer(make: Make) -> None:
    _, _, reports = finish_all(make(), [spec(prompt_ids=(5,), prompt_logprobs=2)])
    (found,) = [one.prompt_logprobs for one in reports if one.prompt_logprobs is not None]
    assert len(found.logprobs) == 0


def test_a_request_that_continues_has_no_log_probabilities_of_its_prompt(make: Make) -> None:
    _, _, reports = finish_all(make(), [spec(committed_ids=(7,), prompt_logprobs=2)])
    assert all(one.prompt_logprobs is None for one in reports)


@like_torch
def test_log_probabilities_are_those_of_the_torch_engine(
    make: Make, by_torch: Callable[[list[Specification]], Any]
) -> None:
    specs = [replace(one, logprobs=at % 4) for at, one in enumerate(mixed(8, max_tokens=12))]
    _, _, ours = by_torch(specs)
    texts, _, theirs = finish_all(make(slots=8), specs)

    for one in specs:
        expected, found = (
            [made for report in reports if report.request_id == one.request_id for made in report.logprobs]
            for reports in (ours, theirs)
        )
        assert len(found) == len(expected) == len(texts[one.request_id])
        for mine, other in zip(expected, found, strict=True):
            assert other.logprob == pytest.approx(mine.logprob, abs=1e-4)
            assert [token for token, _ in other.top] == [token for token, _ in mine.top]
            assert len(other.top) == one.logprobs


@equal_arithmetic
def test_eos_ends_the_text_unless_it_is_ignored(make: Make) -> None:
    """Token 2 is the end token of the pair."""
    specs = [replace(one, sampling=Sampling(1.0, seed=at), max_tokens=60) for at, one in enumerate(mixed(16))]
    free, *_ = finish_all(make(slots=16), specs)
    ended, last, _ = finish_all(make(slots=16), [replace(one, ignore_eos=False) for one in specs])

    stopped = [name for name, report in last.items() if report.finish is End.STOP]
    assert len(stopped) > 2
    for name, tokens in ended.items():
        assert tokens == free[name][: len(tokens)]
        assert (2 in tokens) == (name in stopped)


# -- formats -------------------------------------------------------------------------------------------------

FORMATS = {
    "object": OutputFormat(FormatKind.JSON_OBJECT),
    "schema": OutputFormat(
        FormatKind.JSON_SCHEMA,
        json.dumps(
            {
                "type": "object",
                "properties": {"n": {"type": "integer", "maximum": 999}, "ok": {"type": "boolean"}},
                "required": ["n", "ok"],
                "additionalProperties": False,
            }
        ),
    ),
    "regex": OutputFormat(FormatKind.REGEX, "[a-c]{3,8}=[0-9]{1,3}"),
    "grammar": OutputFormat(FormatKind.GRAMMAR, 'start: "<" /[a-f]+/ ">"\n'),
}
TOKENIZER = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))


def formatted(names: tuple[str, ...] = tuple(FORMATS)) -> list[Specification]:
    return [
        Specification(
            f"{name}-{at}",
            tuple(TOKENIZER.encode(f"Write {name} number {at}:").ids),
            (),
            Sampling(0.9 * (at > 0), seed=at),
            64,
            format=FORMATS[name],
        )
        for name in names
        for at in range(3)
    ]


def matches(name: str, text: str) -> bool:
    match name.partition("-")[0]:
        case "object":
            return isinstance(json.loads(text), dict)
        case "schema":
            return json.loads(text).keys() == {"n", "ok"}
        case "regex":
            return re.fullmatch("[a-c]{3,8}=[0-9]{1,3}", text) is not None
        case _:
            return re.fullmatch("<[a-f]+>", text) is not None


@pytest.fixture(scope="module")
def formatted_texts(one_core: OneCore) -> Texts:
    texts, last, reports = finish_all(one_core.engine(slots=12), formatted())
    whole = [name for name, report in last.items() if report.finish is End.STOP]
    assert len(whole) >= 9
    for name in whole:
        assert matches(name, TOKENIZER.decode(texts[name])), (name, TOKENIZER.decode(texts[name]))
    assert any(report.accepted for report in reports)
    return texts


@like_torch
def test_formatted_texts_are_those_of_the_torch_engine(
    formatted_texts: Texts, by_torch: Callable[[list[Specification]], Any]
) -> None:
    assert formatted_texts == by_torch(formatted())[0]


@equal_arithmetic
def test_formats_hold_when_requests_are_evicted(make: Make, formatted_texts: Texts) -> None:
    assert finish_all(make(slots=4), formatted(), rotate("evict", 4))[0] == formatted_texts


@equal_arithmetic
@pytest.mark.parametrize("cut", [1, 4])
def test_a_format_goes_on_from_committed_tokens(make: Make, formatted_texts: Texts, cut: int) -> None:
    """Another worker has nothing but the specification and what is committed."""
    later = [
        replace(one, committed_ids=tuple(formatted_texts[one.request_id][:cut]))
        for one in formatted()
        if len(formatted_texts[one.request_id]) > cut
    ]
    texts, *_ = finish_all(make(slots=12), later)

    assert texts == {one.request_id: formatted_texts[one.request_id] for one in later}


def test_a_format_that_cannot_be_compiled_ends_its_request_alone(make: Make) -> None:
    bad = {
        "wrong": OutputFormat(FormatKind.GRAMMAR, "start: nowhere"),
        "without bounds": OutputFormat(FormatKind.GRAMMAR, "start: " + "(" * 1500 + '"a"' + ")" * 1500),
    }
    specs = [replace(formatted()[0], request_id=name, format=wanted) for name, wanted in bad.items()]
    texts, last, _ = finish_all(make(slots=3), [*specs, spec("good")])

    for name in bad:
        assert (last[name].finish, texts[name]) == (End.ERROR, [])
        assert (last[name].error or "").startswith("format ")
        assert "\n" not in (last[name].error or "")
    assert len(texts["good"]) == 12


TOO_COSTLY_AFTER_X = OutputFormat(FormatKind.REGEX, f"[)](x{'a?' * 500}|yz)")
"""After x the next step exceeds what the library may compute."""


def preferring(letter: str, name: str) -> Specification:
    (token,) = TOKENIZER.encode(letter, add_special_tokens=False).ids
    sampling = Sampling(logit_bias=((token, 90.0),))
    return Specification(name, (5, 6), (), sampling, 9, format=TOO_COSTLY_AFTER_X)


@cpu_only
def test_a_draft_token_that_a_format_cannot_follow_ends_nothing(
    one_core: OneCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model proposes x. The target chooses y for one request, and for the other the x, after which it
    cannot go on."""
    drafter = one_core.core.model_executor.driver_worker.worker.model_runner.drafter
    compute = drafter.model.compute_logits
    (x,) = TOKENIZER.encode("x", add_special_tokens=False).ids

    def proposing_x(hidden: Any) -> Any:
        logits = compute(hidden).clone()
        logits[:, x] = 1000.0
        return logits

    monkeypatch.setattr(drafter.model, "compute_logits", proposing_x)
    engine = one_core.engine()
    texts, last, reports = finish_all(engine, [preferring("y", "goes on"), preferring("x", "fails")])

    assert any(report.drafted > report.accepted for report in reports)
    assert TOKENIZER.decode(texts["goes on"]) == ")yz", last["goes on"].error
    assert last["goes on"].finish is End.STOP
    assert last["fails"].finish is End.ERROR
    assert (last["fails"].error or "").startswith("the output format cannot continue: lexer error")


def test_committed_tokens_that_do_not_match_the_format_end_the_request(make: Make) -> None:
    one = replace(formatted(("regex",))[0], committed_ids=(TOKENIZER.encode("zz").ids[-1],))
    texts, last, _ = finish_all(make(), [one])

    assert (last[one.request_id].finish, last[one.request_id].error) == (
        End.ERROR,
        "format does not allow the output so far",
    )
    assert texts[one.request_id] == list(one.committed_ids)


def test_a_schema_that_is_not_json_is_refused_at_once(make: Make) -> None:
    bad = replace(formatted()[0], format=OutputFormat(FormatKind.JSON_SCHEMA, "{"))
    with pytest.raises(ValueError, match="format is not valid JSON"):
        make().add(bad)


@equal_arithmetic
def test_rounds_wait_while_a_grammar_compiles(
    one_core: OneCore, formatted_texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner asks for the next round at once; without a wait it would ask some thousand times."""
    backend = one_core.core.structured_output_manager.backend
    compile_at_once = backend.compile_grammar

    def compile_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return compile_at_once(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_grammar", compile_slowly)
    one = formatted()[0]
    texts, _, reports = finish_all(one_core.engine(), [one])

    assert texts[one.request_id] == formatted_texts[one.request_id]
    assert 1 <= sum(not report.tokens for report in reports) <= 60


# -- room ----------------------------------------------------------------------------------------------------


@cpu_only
def test_a_request_that_joins_a_round_with_loaded_kv_is_reported_in_it(make: Make) -> None:
    """vLLM admits it before the planned ones: it holds blocks that no round counts."""
    specs = [spec(name, logprobs=2) for name in "ab"]
    texts, _, alone = finish_all(make(), specs)
    engine = make()
    for one in specs:
        engine.add(one)
    reports = [*engine.round(["a"]).requests]
    let_it_wait(engine, "a")
    reports += engine.round(["b"]).requests
    assert [report.request_id for report in reports] == ["a", "b", "a"]
    while reports[-1].finish is None:
        reports += engine.round(["a"]).requests

    of_a = [report for report in reports if report.request_id == "a"]
    assert [token for report in of_a for token in report.tokens] == texts["a"]
    made = [one.logprob for report in of_a for one in report.logprobs]
    expected = [one.logprob for report in alone if report.request_id == "a" for one in report.logprobs]
    assert made == pytest.approx(expected, abs=1e-3)


@cpu_only
def test_a_request_that_was_dropped_while_its_kv_was_loaded_can_come_again(make: Make) -> None:
    """vLLM has the dropped one until the load is over."""
    make()  # vLLM's own sampler needs the coupling in these tests
    engine = make(chooser=TokenChooser.VLLM)
    one = spec("a", sampling=Sampling())
    engine.add(one)
    engine.round(["a"])
    let_it_wait(engine, "a")
    engine._known["a"].request.status = RequestStatus.WAITING_FOR_REMOTE_KVS  # type: ignore[attr-defined]
    engine.drop("a")
    engine.add(one)

    assert engine.round(["a"]).requests[0].tokens


def let_it_wait(engine: Any, name: str) -> None:
    """Let a resident request wait with its KV, as after a load from host memory (`kv_offloading_size`)."""
    scheduler, request = engine._scheduler, engine._known[name].request
    scheduler.running.remove(request)
    request.status = RequestStatus.PREEMPTED
    request.spec_token_ids = []
    scheduler.kv_holding_waiting.add_request(request)


def test_a_round_needs_places_for_its_requests(make: Make) -> None:
    engine = make(residents=2)
    for name in "abc":
        engine.add(spec(name))
    engine.round(["a", "b"])
    with pytest.raises(OutOfBlocks, match="vLLM has 2 places for requests with KV"):
        engine.round(["c"])
    engine.evict("b")

    assert engine.round(["c"]).requests[0].tokens
    assert [engine.status(name).residency for name in "abc"] == [
        Residency.DEVICE,
        Residency.NONE,
        Residency.DEVICE,
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_finds_its_own_kv_again_and_that_of_others_if_allowed(make: Make, shared: bool) -> None:
    engine = make(share_prefixes=shared)
    prompt = tuple(range(10, 80))  # two whole blocks and a half
    for name in "ab":
        engine.add(spec(name, prompt_ids=prompt))
    engine.round(["a"])
    assert engine.round(["b"]).requests[0].cached == (64 if shared else 0)
    engine.evict("a")
    (report,) = engine.round(["a"]).requests
    assert (report.cached, report.prefilled) == (64, 71 - 64)


def test_kv_is_not_found_under_another_salt(make: Make) -> None:
    engine = make(share_prefixes=True)
    prompt = tuple(range(10, 80))
    for name, salt in (("a", "acme"), ("b", "other"), ("c", "acme")):
        engine.add(spec(name, prompt_ids=prompt, cache_salt=salt))

    assert [engine.round([name]).requests[0].cached for name in "abc"] == [0, 0, 64]


def test_the_prompt_blocks_that_are_reported_are_found(make: Make) -> None:
    """With a model; more on them is in test_cached_prompts.py."""
    engine = make()
    replica = Replica(engine)
    prompt = prompt_of(1, 2, tail=10)
    finish_all(engine, [spec(prompt_ids=prompt, cache_salt="acme", max_tokens=4)])
    assert replica.follow() == {*split(name_blocks(prompt, "acme"))}
    longer = prompt_of(1, 2, 3)
    _, _, (first, *_) = finish_all(engine, [spec(prompt_ids=longer, cache_salt="acme", max_tokens=4)])

    assert first.cached == 2 * BLOCK_TOKENS == replica.leading(longer, "acme") * BLOCK_TOKENS
    assert len(replica.follow()) == 3


@equal_arithmetic
@pytest.mark.parametrize("room", [{"blocks": 14}, {"residents": 5}], ids=["few blocks", "few places"])
def test_the_runner_serves_with_little_room_and_changing_ranks(
    make: Make, expected: Texts, room: dict[str, int]
) -> None:
    """The production runner; 14 blocks hold a sixth of the requests, 5 places a quarter."""
    engine = make(slots=4, **room)
    desk = Desk(engine)
    specs = mixed(20)
    desk.give(*specs)
    rng = random.Random(4)
    for _ in range(400):
        names = [one.request_id for one in specs]
        rng.shuffle(names)
        desk.assign(*(entry(name, float(at)) for at, name in enumerate(names)))
        desk.turns(7)
        if all(held.ended for held in desk.runner._requests.by_id.values()):
            break

    assert {one.request_id: list(desk.tokens(one.request_id)) for one in specs} == expected
    evictions = [change for one in desk.rounds for change in one.residency if change[2] is Residency.NONE]
    assert len(evictions) > 3
    engine.check()  # type: ignore[attr-defined]


# -- failures ------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_the_engine(one_core: OneCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler and its model runner would go different ways: no half of the batch is tried."""
    steps: list[None] = []

    def fails() -> None:
        steps.append(None)
        raise RuntimeError("CUDA error: device-side assert triggered\nand more")

    engine = one_core.engine()
    desk = Desk(engine)
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a"), entry("b"))
    with monkeypatch.context() as patch:
        patch.setattr(one_core.core, "step", fails)
        with pytest.raises(DeviceFailed, match="a step of vLLM failed: CUDA error: device-side assert"):
            desk.turns(1)
    assert len(steps) == 1
    with pytest.raises(DeviceFailed):
        engine.round(["a"])


def test_a_step_without_memory_names_the_settings(one_core: OneCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    engine = one_core.engine()
    engine.add(spec("a"))
    with monkeypatch.context() as patch:
        patch.setattr(one_core.core, "step", fails)
        with pytest.raises(DeviceFailed, match=r"no memory for a step of 1 requests.*LAPS_SD_SLOTS"):
            engine.round(["a"])


@cpu_only
def test_a_request_whose_numbers_break_ends_alone(one_core: OneCore, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = one_core.core.model_executor.driver_worker.worker.model_runner
    compute = runner.model.compute_logits
    expected, *_ = finish_all(one_core.engine(), [spec("a"), spec("b", prompt_ids=(7, 8, 9))])

    def broken(hidden: Any) -> Any:
        logits = compute(hidden).clone()
        if "bad" in runner.input_batch.req_ids:
            logits[runner.input_batch.req_ids.index("bad")] = float("nan")
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", broken)
    specs = [spec("a"), spec("bad", prompt_ids=(4, 3, 2)), spec("b", prompt_ids=(7, 8, 9))]
    texts, last, _ = finish_all(one_core.engine(), specs)

    assert (last["bad"].finish, texts["bad"]) == (End.ERROR, [])
    assert "not finite" in (last["bad"].error or "")
    assert {name: texts[name] for name in "ab"} == expected


def test_a_request_that_cannot_be_decoded_ends_alone(make: Make) -> None:
    def fails(ids: Any) -> str:
        raise ValueError("no such token")

    texts, last, _ = finish_all(make(decode=fails), [spec("bad", stop=("never",)), spec("good")])

    assert (last["bad"].finish, last["bad"].error) == (
        End.ERROR,
        "the output cannot be decoded: no such token",
    )
    assert len(texts["good"]) == 12


def test_what_needs_a_tokenizer_is_refused_without_one(make: Make) -> None:
    engine = make(decode=None, formats=False)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        engine.add(spec(stop=("x",)))
    with pytest.raises(ValueError, match="format needs a tokenizer"):
        engine.add(spec(ignore_eos=False, format=FORMATS["object"]))
    assert not engine.known()


# -- the probe of output lengths -----------------------------------------------------------------------------


@cpu_only
def test_the_probe_sees_the_last_layers_state_of_the_last_token(make: Make) -> None:
    """With drafts, prompts in chunks, and requests that lose their KV; the text is the same as without it."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.worker.recorded import Recorded

    asked = [replace(one, ignore_eos=False, max_tokens=150) for one in mixed(8)]
    probe = Recorded("demo", 6, 256)
    texts, last, _ = finish_all(
        make(slots=4, prefill_chunk=32, probe=probe), asked, rotate("evict", every=20)
    )
    assert texts == finish_all(make(slots=4), asked)[0]
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()
    states = {}
    for one in asked:
        ids = torch.tensor([[*one.prompt_ids, *texts[one.request_id]]])
        with torch.inference_mode():
            states[one.request_id] = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    for seen in probe.seen.values():
        ((length, cut),) = seen.ends
        fits = [
            one
            for one in asked
            if len(texts[one.request_id]) == length
            and (last[one.request_id].finish is End.LENGTH) == cut
            and all(
                torch.allclose(
                    torch.from_numpy(hidden),
                    states[one.request_id][len(one.prompt_ids) + tokens - 1],
                    atol=1e-3,
                )
                for tokens, hidden in seen.looks
            )
        ]
        assert len(fits) == 1
    assert len(probe.seen) == len(asked)
    assert probe.requests == len(asked)


@cpu_only
def test_vllms_own_sampler_leaves_nothing_to_look_at(make: Make) -> None:
    from tests.worker.recorded import Recorded

    probe = Recorded("demo", 6, 256)
    greedy = [replace(one, ignore_eos=False) for one in mixed(4) if not one.sampling.temperature]
    finish_all(make(chooser=TokenChooser.VLLM, probe=probe), greedy)
    assert not any(seen.looks for seen in probe.seen.values())


# -- vLLM's own sampler --------------------------------------------------------------------------------------


@equal_arithmetic
def test_with_its_own_sampler_greedy_text_is_the_same(make: Make, expected: Texts) -> None:
    greedy = [one for one in mixed(20) if not one.sampling.temperature]
    engine = make(chooser=TokenChooser.VLLM)
    texts, _, reports = finish_all(engine, [replace(one, logprobs=1) for one in greedy], rotate("evict"))

    assert texts == {one.request_id: expected[one.request_id] for one in greedy}
    assert sum(report.accepted for report in reports) > 10
    assert all(len(report.logprobs) == len(report.tokens) for report in reports)


def restricted(whole: Texts) -> list[Specification]:
    """Return greedy requests whose restrictions change their texts `whole`, two of each kind."""
    made = []
    for at, one in enumerate(mixed(12, kinds=(Sampling(),))):
        text = whole[one.request_id]
        changes: dict[str, Any] = [
            {"stop_token_ids": (text[5], text[9])},
            {"stop_token_ids": (text[3], text[9]), "sampling": Sampling(min_tokens=20)},
            {"sampling": Sampling(bad_words_ids=((text[4],), (text[8],)))},
            {"sampling": Sampling(bad_words_ids=(tuple(text[4:6]), tuple(text[8:11])))},
            {"sampling": Sampling(allowed_token_ids=tuple(range(3, 400, 2)))},
            {"ignore_eos": False, "sampling": Sampling(min_tokens=40)},
        ][at % 6]
        made.append(replace(one, **changes))
    return made


@equal_arithmetic
def test_with_its_own_sampler_restrictions_hold(make: Make) -> None:
    """At each draft token, and after committed ones where it can count these."""
    whole, *_ = finish_all(make(slots=12), mixed(12, kinds=(Sampling(),)))
    specs = restricted(whole)
    expected, ends, _ = finish_all(make(slots=12), specs)
    texts, last, reports = finish_all(make(slots=12, chooser=TokenChooser.VLLM), specs)

    assert sum(texts[name] != whole[name] for name in texts) > 8
    assert sum(report.accepted for report in reports) > 10
    assert texts == expected
    assert {name: report.finish for name, report in last.items()} == {
        name: report.finish for name, report in ends.items()
    }
    later = [
        replace(one, committed_ids=tuple(expected[one.request_id][:7]))
        for one in specs
        if len(expected[one.request_id]) > 8 and all(len(word) == 1 for word in one.sampling.bad_words_ids)
    ]
    assert len(later) > 5
    again, *_ = finish_all(make(slots=12, chooser=TokenChooser.VLLM), later)
    assert again == {one.request_id: expected[one.request_id] for one in later}


@cpu_only
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": Sampling(0.5)}, "sampling.temperature must be 0 on this worker"),
        ({"sampling": Sampling(logit_bias=((1, 1.0),))}, "sampling.min_p and sampling.logit_bias"),
        (
            {"sampling": Sampling(presence_penalty=1.0), "committed_ids": (5,)},
            "sampling.presence_penalty and sampling.frequency_penalty cannot continue",
        ),
        (
            {"sampling": Sampling(bad_words_ids=((5, 6),)), "committed_ids": (5,)},
            "sampling.bad_words_ids of several tokens cannot continue",
        ),
    ],
)
def test_what_its_own_sampler_would_do_wrong_is_refused(
    make: Make, changes: dict[str, Any], words: str
) -> None:
    engine: VllmEngine = make(chooser=TokenChooser.VLLM)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=words) as caught:
        engine.add(spec(**changes))
    assert "LAPS_SD_VLLM_SAMPLING=coupled" in str(caught.value)
    assert not engine.known()


# -- loading -------------------------------------------------------------------------------------------------


def test_an_argument_that_vllm_does_not_know_is_named() -> None:
    with pytest.raises(ModelError, match=r"LAPS_SD_VLLM_ARGS has 'speculation', which vLLM .* does not know"):
        load_core(replace(PAIR, arguments={"speculation": 4}))


def test_a_model_that_vllm_cannot_load_is_one_sentence(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=f"vLLM cannot load {tmp_path}") as caught:
        load_core(replace(PAIR, model=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_length": 99_999}, r"User-specified max_model_len \(99999\) is greater than"),
        ({"arguments": {"pipeline_parallel_size": 0}}, r"pipeline_parallel_size: Input .* equal to 1, got 0"),
    ],
)
def test_the_sentence_has_the_reason_for_which_vllm_refuses_a_setting(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=f"vLLM cannot load {TARGET_DIR}: {reason}"):
        load_core(replace(PAIR, **change))
