"""Every sampling option has the same effect under speculation as in plain decoding, with any drafts, batches
and preemption.

The reference is `plain`: transformers with its ordinary cache, one token per forward, and each option written
a second time from its definition. `test_identity` explains the margin rule.
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from laps_sd.contract.ends import End
from tests.worker.drive import Between, everybody, finish_all, rotate
from tests.worker.pairs import MAX_LENGTH, VOCAB, load_pair
from tests.worker.plain import Allowed, PlainDecoder, PlainText
from tests.worker.test_identity import AnyLengths, assert_same
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import (
    Drafter,
    FormatKind,
    OutputFormat,
    Sampling,
    Specification,
    TokenLogprobs,
)

PROMPTS = 8
TOKENS = 24

OPTIONS = {
    "min_p": Sampling(1.6, min_p=0.3),
    "min_p of a nucleus": Sampling(3.0, top_p=0.98, top_k=100, min_p=0.5),
    "repetition penalty": Sampling(0.8, repetition_penalty=1.3),
    "repetition penalty, greedy": Sampling(repetition_penalty=1.5),
    "presence penalty": Sampling(0.8, presence_penalty=1.5),
    "frequency penalty": Sampling(0.8, frequency_penalty=0.7),
    "frequency reward": Sampling(0.8, top_p=0.9, frequency_penalty=-0.5),
    "bias": Sampling(0.8, logit_bias=((7, 3.0), (9, -100.0), (VOCAB - 1, 1.5))),
    "bias, greedy": Sampling(logit_bias=((7, 2.0), (8, 2.0))),
    "all at once": Sampling(
        0.9, top_p=0.95, top_k=50, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias=((3, 1.0),),
    ),
}  # fmt: skip

SCHEDULES: dict[str, tuple[int, int | None, Between]] = {
    "batch 1, no draft": (1, 0, everybody),
    "batch 8, draft 4": (8, 4, everybody),
    "batch 3, changing, dropped": (3, None, rotate("evict")),
    "batch 3, changing, swapped": (3, None, rotate("swap")),
}


def specifications(sampling: Sampling) -> list[Specification]:
    rng = random.Random(1)
    return [
        Specification(
            f"r{number}",
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 8, 33)))),
            (),
            replace(sampling, seed=number),
            rng.randrange(TOKENS // 2, TOKENS + 1),
            ignore_eos=True,
        )
        for number in range(PROMPTS)
    ]


@functools.cache
def decoder_for(target: Path, device: str) -> PlainDecoder:
    return PlainDecoder(str(target), device)


@functools.cache
def plainly(spec: Specification, target: Path, device: str) -> PlainText:
    return decoder_for(target, device).decode(spec)


@functools.cache
def loaded(
    pair: tuple[Path, ...], device: str, slots: int, draft_len: int | None, more: tuple[tuple[str, Any], ...]
) -> SpeculativeEngine:
    return load_pair(
        *pair, device=device, slots=slots, blocks=PROMPTS * (MAX_LENGTH // 16), block_size=8, max_length=MAX_LENGTH,
        max_draft_len=5, draft_len=4 if draft_len is None else draft_len, prefill_chunk=64, **dict(more),
    )  # fmt: skip


def engine_for(
    pair: tuple[Path, ...], device: str, slots: int, draft_len: int | None, **more: Any
) -> SpeculativeEngine:
    """Return an engine without requests. Calls with the same options share it: loading costs more than a
    test."""
    engine = loaded(pair, device, slots, draft_len, tuple(more.items()))
    for request_id in list(engine.known()):  # of a test that failed
        engine.drop(request_id)
    if draft_len is None:
        engine.lengths = AnyLengths(5, seed=slots)
    return engine


@pytest.mark.parametrize("option", OPTIONS)
def test_options_say_what_plain_decoding_says(option: str, pair: tuple[Path, Path], device: str) -> None:
    specs = specifications(OPTIONS[option])
    plain = {spec.request_id: plainly(spec, pair[0], device) for spec in specs}
    without = {spec.request_id: plainly(replace(spec, sampling=Sampling(
        spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k, spec.sampling.seed)), pair[0], device).tokens for spec in specs}  # fmt: skip
    assert any(text.tokens != without[name] for name, text in plain.items()), "the option changes nothing"
    first: dict[str, list[int]] | None = None
    for slots, draft_len, between in SCHEDULES.values():
        output, _, reports = finish_all(engine_for(pair, device, slots, draft_len), specs, between)
        assert_same(output, plain)
        assert first is None or output == first, "two runs of the engine differ"
        first = output
        assert (sum(report.accepted for report in reports) > 0) == (draft_len != 0)


def test_looking_up_says_what_the_draft_model_says(pair: tuple[Path, Path], device: str) -> None:
    """Repetitive prompts, so that there is something to find; requests of both kinds in one batch."""
    rng = random.Random(3)
    specs = []
    for number in range(PROMPTS):
        phrase = [rng.randrange(2, VOCAB) for _ in range(6)]
        sampling = (
            Sampling(),
            Sampling(0.3, seed=number),
            Sampling(0.8, frequency_penalty=-0.5, seed=number),
        )[number % 3]
        specs.append(Specification(f"r{number}", tuple(phrase * 4), (), sampling, TOKENS, ignore_eos=True))
    expected, *_ = finish_all(engine_for(pair, device, 8, 0), specs)
    for drafters, folders in (
        ((None,), pair),
        ((Drafter.LOOKUP,), pair),
        ((Drafter.MODEL, Drafter.LOOKUP, None), pair),
        ((None,), pair[:1]),
        ((Drafter.MODEL,), pair[:1]),  # it has none, and looks up
    ):
        named = [replace(spec, drafter=drafters[n % len(drafters)]) for n, spec in enumerate(specs)]
        for slots, draft_len, between in ((1, 4, everybody), (8, None, everybody), (3, 4, rotate("evict"))):
            output, _, reports = finish_all(engine_for(folders, device, slots, draft_len), named, between)
            assert output == expected
            assert sum(report.accepted for report in reports) > 0
            if draft_len is None and folders == pair and drafters == (None,):
                assert {report.looked_up for report in reports if report.drafted} == {False, True}
    none = engine_for(pair, device, 4, 0, drafter="none")
    assert none.capacity.max_draft_len == none.capacity.draft_blocks == 0
    output, _, reports = finish_all(none, [replace(spec, drafter=Drafter.LOOKUP) for spec in specs])
    assert output == expected and not any(report.drafted for report in reports)


# -- output formats ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lettered_pair(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the pair, with a tokenizer of bytes and a few pairs of letters."""
    import shutil

    tokens = ["<bos>", "<eos>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    merges = [
        ("t", "r"),
        ("tr", "u"),
        ("tru", "e"),
        ('"', ":"),
        ("a", "b"),
        ("1", "2"),
        ("}", "}"),
        (",", "Ġ"),
    ]
    tokens += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    root = tmp_path_factory.mktemp("lettered")
    folders = tuple(Path(shutil.copytree(source, root / source.name)) for source in pair)
    for folder in folders:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folders[0], folders[1]


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["true story", "truth", "trouble"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 1200},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["kind", "size", "tags", "good"],
    "additionalProperties": False,
}  # fmt: skip

FORMATS = {
    "schema": OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": OutputFormat(FormatKind.JSON_OBJECT),
    "regex": OutputFormat(FormatKind.REGEX, r"(ab|true|[0-9]{2,4}){3,9}!"),
    "grammar": OutputFormat(FormatKind.GRAMMAR, 'start: pair ("," pair)*\npair: /[a-c]+/ "=" /[0-9]{1,3}/'),
}


def allowed_by(folder: Path, wanted: OutputFormat) -> Allowed:
    """Return a function for the tokens that may follow an output: the whole output is read
    again each time.
    """
    from llguidance import LLTokenizer

    from worker_svc.engine.sampling.formats import matcher_of

    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=1)

    def allowed(output: list[int]) -> set[int]:
        matcher = matcher_of(wanted, tokenizer)
        assert matcher.consume_tokens(output) or not output
        bits = matcher.compute_bitmask()
        return {token for token in range(VOCAB) if bits[token // 8] >> (token % 8) & 1}

    return allowed


def formatted(wanted: OutputFormat) -> list[Specification]:
    return [
        Specification(f"r{n}", (5 + n, 6, 7), (), (Sampling(), Sampling(0.9, seed=n), Sampling(1.0, top_p=0.9, presence_penalty=0.5,
                      seed=n))[n % 3], 70, format=wanted)
        for n in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_say_what_plain_decoding_says(
    name: str, lettered_pair: tuple[Path, Path], device: str
) -> None:
    wanted = FORMATS[name]
    specs = formatted(wanted)
    decoder, allowed = decoder_for(lettered_pair[0], device), allowed_by(lettered_pair[0], wanted)
    plain = {spec.request_id: decoder.decode(spec, frozenset({1}), allowed) for spec in specs}
    tokenizer = Tokenizer.from_file(str(lettered_pair[0] / "tokenizer.json"))
    for folders, schedules in (
        (lettered_pair, list(SCHEDULES.values())),
        (lettered_pair[:1], [(4, None, rotate("evict"))]),  # proposals are looked up
    ):
        for slots, draft_len, between in schedules:
            output, last, _ = finish_all(engine_for(folders, device, slots, draft_len), specs, between)
            assert_same(output, plain)
            for request_id, report in last.items():
                text = tokenizer.decode(output[request_id], skip_special_tokens=True)
                if report.finish is End.STOP:
                    assert complete(wanted, text), text
                else:
                    assert report.finish is End.LENGTH
            assert any(report.finish is End.STOP for report in last.values()) or name == "object"


def complete(wanted: OutputFormat, text: str) -> bool:
    match wanted.kind:
        case FormatKind.JSON_OBJECT:
            return isinstance(json.loads(text), dict)
        case FormatKind.JSON_SCHEMA:
            value = json.loads(text)
            return (
                set(value) == set(SCHEMA["properties"])
                and 1 <= value["size"] <= 1200
                and len(value["tags"]) <= 3  # type: ignore[arg-type]
            )
        case FormatKind.REGEX:
            return re.fullmatch(wanted.text, text) is not None
        case _:
            return re.fullmatch(r"[a-c]+=[0-9]{1,3}(,[a-c]+=[0-9]{1,3})*", text) is not None


def test_a_format_goes_on_from_committed_tokens(lettered_pair: tuple[Path, Path], device: str) -> None:
    """Another worker has nothing but the specification and what is committed."""
    engine = engine_for(lettered_pair, device, 4, 4)
    specs = formatted(FORMATS["schema"])
    whole, *_ = finish_all(engine, specs)
    for cut in (1, 9):
        later = [replace(spec, committed_ids=tuple(whole[spec.request_id][:cut])) for spec in specs]
        assert finish_all(engine_for(lettered_pair, device, 2, 2), later)[0] == whole


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (OutputFormat(FormatKind.JSON_SCHEMA, "{"), "format is not valid JSON"),
        (OutputFormat(FormatKind.JSON_SCHEMA, '{"type": "nothing"}'), "format cannot be used"),
        (OutputFormat(FormatKind.REGEX, "(a"), "format cannot be used"),
        (OutputFormat(FormatKind.GRAMMAR, "start: nowhere"), "format cannot be used"),
        (OutputFormat(FormatKind.REGEX, "a" * 70_000), "format must have at most 65536 characters"),
    ],
)
def test_a_format_that_cannot_be_is_refused(
    wanted: OutputFormat, words: str, lettered_pair: tuple[Path, Path]
) -> None:
    engine = engine_for(lettered_pair, "cpu", 1, 0)
    with pytest.raises(ValueError, match=words) as caught:
        engine.add(Specification("a", (5,), (), Sampling(), 9, format=wanted))
    assert "\n" not in str(caught.value)
    assert not engine.known()


def test_a_format_needs_a_tokenizer_and_the_end_token(
    lettered_pair: tuple[Path, Path], pair: tuple[Path, Path]
) -> None:
    spec = Specification("a", (5,), (), Sampling(), 9, format=FORMATS["object"])
    with pytest.raises(ValueError, match="format needs a tokenizer"):
        engine_for(pair, "cpu", 1, 0).add(spec)
    with pytest.raises(ValueError, match="format and ignore_eos exclude each other"):
        engine_for(lettered_pair, "cpu", 1, 0).add(replace(spec, ignore_eos=True))


def test_a_format_that_the_vocabulary_cannot_write_ends_its_request(lettered_pair: tuple[Path, Path]) -> None:
    """An umlaut is not a token of this model: the text before it stays, the request ends with the reason,
    others continue.
    """
    engine = engine_for(lettered_pair, "cpu", 2, 3)
    wanted = OutputFormat(FormatKind.REGEX, "abc\N{LATIN SMALL LETTER U WITH DIAERESIS}")
    stuck = Specification("stuck", (5,), (), Sampling(), 9, format=wanted)
    other = Specification("other", (5, 6), (), Sampling(0.7, seed=1), 9, ignore_eos=True)
    alone, *_ = finish_all(engine, [other])
    output, last, _ = finish_all(engine, [stuck, other])
    assert last["stuck"].finish is End.ERROR
    assert "output format" in (last["stuck"].error or "")
    assert output["other"] == alone["other"]


TOO_COSTLY_AFTER_X = OutputFormat(FormatKind.REGEX, f"[)](x{'a?' * 500}|yz)")
"""After x the next step exceeds what the library may compute."""


def test_a_draft_token_that_a_format_cannot_follow_ends_nothing(
    lettered_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup proposes x, and the target chooses y, as it does without drafts."""
    wanted = TOO_COSTLY_AFTER_X
    tokenizer = Tokenizer.from_file(str(lettered_pair[0] / "tokenizer.json"))
    prompt = tuple(tokenizer.encode("(ab)x(ab)x(ab").ids)
    (y,) = tokenizer.encode("y").ids
    spec = Specification("a", prompt, (), Sampling(logit_bias=((y, 50.0),)), 9, format=wanted)
    for draft_len in (0, 4):
        engine = engine_for(lettered_pair[:1], "cpu", 1, draft_len)
        monkeypatch.setattr(engine.lengths, "row_price", lambda *_: 0.0)
        output, last, reports = finish_all(engine, [spec])
        assert tokenizer.decode(output["a"]) == ")yz", last["a"].error
        assert last["a"].finish is End.STOP
        assert any(report.looked_up and not report.accepted for report in reports) == (draft_len > 0)


def test_a_format_that_fails_for_one_request_continues_for_others(lettered_pair: tuple[Path, Path]) -> None:
    """The library's matchers of one compiled format share what they compute, a failure too."""
    tokenizer = Tokenizer.from_file(str(lettered_pair[0] / "tokenizer.json"))

    def preferring(letter: str, name: str) -> Specification:
        (token,) = tokenizer.encode(letter).ids
        sampling = Sampling(logit_bias=((token, 90.0),))
        return Specification(name, (5, 6), (), sampling, 9, format=TOO_COSTLY_AFTER_X)

    engine = engine_for(lettered_pair, "cpu", 2, 0)
    output, last, _ = finish_all(engine, [preferring("x", "fails"), preferring("y", "beside")])
    assert last["fails"].finish is End.ERROR
    assert "output format" in (last["fails"].error or "")
    assert tokenizer.decode(output["beside"]) == ")yz", last["beside"].error
    output, last, _ = finish_all(engine, [preferring("y", "later")])
    assert tokenizer.decode(output["later"]) == ")yz", last["later"].error


# -- log probabilities ------------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_plain_decoding(pair: tuple[Path, Path], device: str) -> None:
    specs = [replace(spec, logprobs=n % 4) for n, spec in enumerate(specifications(OPTIONS["all at once"]))]
    specs[0] = replace(specs[0], logprobs=None)
    plain = {spec.request_id: decoder_for(pair[0], device).decode(spec) for spec in specs}
    for slots, draft_len, between in SCHEDULES.values():
        output, _, reports = finish_all(engine_for(pair, device, slots, draft_len), specs, between)
        assert_same(output, plain)
        told: dict[str, list[TokenLogprobs]] = {spec.request_id: [] for spec in specs}
        for report in reports:
            told[report.request_id].extend(report.logprobs)
        assert told["r0"] == []
        for spec in specs[1:]:
            found = told[spec.request_id]
            if output[spec.request_id] != plain[spec.request_id].tokens:
                continue
            assert [one.logprob for one in found] == pytest.approx(plain[spec.request_id].logprobs, abs=1e-3)
            assert {len(one.top) for one in found} == {spec.logprobs}
            for one in found:
                assert list(one.top) == sorted(one.top, key=lambda pair: -pair[1])
                assert all(one.logprob <= one.top[0][1] + 1e-6 for _ in one.top[:1])


def test_logprobs_are_finite_where_a_format_forbids(lettered_pair: tuple[Path, Path]) -> None:
    """They are the model's own, so that a token which the format forced shows how unlikely it was."""
    spec = replace(formatted(FORMATS["regex"])[1], logprobs=2)
    _, _, reports = finish_all(engine_for(lettered_pair, "cpu", 1, 4), [spec])
    told = [one for report in reports for one in report.logprobs]
    assert told and all(-100 < one.logprob <= 0 for one in told)
    assert torch.tensor([one.logprob for one in told]).exp().min() < 0.05
