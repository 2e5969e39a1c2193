"""The contract of interface.Engine, held by the real engine and the fake alike, and what only the real one
has."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from laps_sd.contract.ends import End
from tests.worker.contract import EngineContract, Make, decode, spec
from tests.worker.drive import finish_all, rotate
from tests.worker.pairs import VOCAB, llama_config, load_pair, write_draft_of, write_model
from worker_svc.engine.cache.kv import KVPool
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import (
    DeviceFailed,
    Drafter,
    Engine,
    OutOfMemory,
    Residency,
    Sampling,
)
from worker_svc.engine.proposers.lookup import Found
from worker_svc.fake.engine import FakeEngine


@pytest.fixture(scope="module")
def spoken_pair(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the pair, with a tokenizer whose token i reads " w{i}"."""
    root = tmp_path_factory.mktemp("spoken")
    directories = tuple(Path(shutil.copytree(source, root / source.name)) for source in pair)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    for directory in directories:
        tokenizer.save(str(directory / "tokenizer.json"))
    return directories[0], directories[1]


@pytest.fixture(params=["real", "fake"])
def make(request: pytest.FixtureRequest, spoken_pair: tuple[Path, Path], device: str) -> Make:
    def build(**options: Any) -> Engine:
        options = {
            "slots": 4,
            "blocks": 64,
            "block_size": 4,
            "max_length": 128,
            "max_draft_len": 4,
            "draft_len": 3,
            **options,
        }
        if request.param == "real":
            host_tokens = options.pop("host_tokens", None)
            if host_tokens is not None:
                options["host_bytes"] = (
                    host_tokens * 2 * 4 * 2 * 16 * (2 + 2)
                )  # float32, 2 heads of 16, 2 layers in either model
            return load_pair(*spoken_pair, device=device, **options)
        blocks = options.pop("blocks")
        return FakeEngine(target_blocks=blocks, vocab_size=VOCAB, eos_id=1, decode=decode, **options)

    return build


class TestContract(EngineContract):
    """The contract, once for each of the two engines."""


def test_swapping_out_is_refused_when_the_host_is_full(make: Make) -> None:
    engine = make(host_tokens=14)
    for name in "ab":
        engine.add(spec(name, prompt_ids=tuple(range(2, 12))))
    for _ in range(2):  # the draft has its KV after the second
        engine.round(["a", "b"])
    assert engine.swap_out("a")
    assert not engine.swap_out("b")
    assert engine.status("b").residency is Residency.DEVICE
    assert engine.swap_out("a"), "nothing to do is no failure"
    engine.drop("a")
    assert engine.swap_out("b")
    (report,) = engine.round(["b"]).requests
    assert report.prefilled == 0, "its KV came back"
    assert report.tokens


@pytest.mark.parametrize("pool", [0, 1], ids=["target", "draft"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel"),
    ],
)
def test_swapping_out_is_refused_when_there_is_no_memory_for_the_copy(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch, error: Exception, pool: int
) -> None:
    engine = load_pair(*pair, device=device, slots=2, max_length=64, draft_len=2)
    engine.add(spec())
    for _ in range(2):  # the draft has its KV after the second
        engine.round(["a"])
    before = engine.status("a")

    def fails(_: Any) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._pair.pools[pool], "copy_out", fails)
        assert not engine.swap_out("a")
    assert engine.status("a") == before
    engine.check()
    assert engine.round(["a"]).requests[0].prefilled == 0


def test_eos_ends_the_text_unless_it_is_ignored(spoken_pair: tuple[Path, Path], device: str) -> None:
    """Token 1 is EOS. Of 40 seeds some meet it; their text is the beginning of the one that ignores it."""
    specs = [spec(f"r{n}", sampling=Sampling(1.2, seed=n), max_tokens=60) for n in range(40)]
    engine = load_pair(*spoken_pair, device=device, slots=16, max_length=128, draft_len=4)
    free, *_ = finish_all(engine, specs)
    ended, last, _ = finish_all(engine, [replace(s, ignore_eos=False) for s in specs])
    stopped = [name for name, report in last.items() if report.finish is End.STOP]
    assert len(stopped) > 5
    for name, tokens in ended.items():
        assert tokens == free[name][: len(tokens)]
        assert (1 in tokens) == (name in stopped) == (len(tokens) < 60 or tokens[-1] == 1)
        assert 1 not in tokens[:-1]


def test_nothing_is_proposed_behind_what_would_end_the_text(
    spoken_pair: tuple[Path, Path], device: str
) -> None:
    """A draft that is the target itself: all that it proposes is accepted, and none of it lies
    after the end.
    """
    if device != "cpu":
        pytest.skip("elsewhere the engine does not look at proposals before they are verified")
    target = spoken_pair[0]
    kinds = (Sampling(1.2), Sampling(1.2, top_k=30), Sampling(1.2, top_p=0.95), Sampling(1.2, min_p=0.01))
    specs = [
        spec(
            f"r{n}",
            sampling=replace(kinds[n % 4], seed=n),
            max_tokens=60,
            ignore_eos=n % 8 == 7,
            logprobs=n % 3,
        )
        for n in range(40)
    ]
    engine = load_pair(target, target, device=device, slots=16, max_length=128, draft_len=4)
    text, last, reports = finish_all(engine, specs)
    plain, *_ = finish_all(load_pair(target, device=device, slots=16, max_length=128, draft_len=0), specs)

    assert text == plain
    assert sum(report.finish is End.STOP for report in last.values()) > 5
    assert sum(report.drafted for report in reports) > 300
    assert all(report.accepted == report.drafted <= len(report.tokens) for report in reports)
    assert all(len(report.logprobs) in (0, len(report.tokens)) for report in reports)


class Eager(DraftLengths):
    """As many tokens of the draft model as a request may have; nothing is looked up."""

    def lengths(self, requests: Any, caps: Any, *_: Any, **__: Any) -> list[int]:
        return [*caps]

    def row_price(self, count: int, keys: int = 0) -> float:
        return math.inf


def test_the_model_drafts_nothing_while_most_of_the_batch_is_prefilled(
    pair: tuple[Path, Path], device: str
) -> None:
    engine = load_pair(*pair, device=device, slots=3, max_length=128, max_draft_len=4, prefill_chunk=16)
    engine.lengths = Eager(4)
    engine.add(spec("a", prompt_ids=(5, 6), max_tokens=60, ignore_eos=True))
    engine.round(["a"])
    for name in "bc":
        engine.add(spec(name, prompt_ids=tuple(range(2, 66)), max_tokens=4))
    assert engine.round(["a", "b", "c"]).requests[0].drafted == 0
    assert engine.round(["a", "b"]).requests[0].drafted == 4


@pytest.mark.parametrize(("ignore_eos", "drafted"), [(False, 2), (True, 4)])
def test_what_is_found_behind_an_end_is_not_proposed(
    pair: tuple[Path, Path], device: str, ignore_eos: bool, drafted: int
) -> None:
    """Look-ups in a prompt that holds the end token, 1. The text is an endless repetition of 9, and each time
    5, 1 and more followed it before.
    """
    always = Sampling(logit_bias=((9, 100.0),))
    request = spec(
        "a", prompt_ids=(9, 5, 1, 7, 8, 6) * 3, sampling=always, max_tokens=12, ignore_eos=ignore_eos
    )
    engine = load_pair(pair[0], device=device, drafter="lookup", max_length=128, draft_len=4)
    _, _, reports = finish_all(engine, [request])
    assert reports[1].drafted == drafted


def test_a_request_whose_numbers_break_ends_alone(pair: tuple[Path, Path], device: str) -> None:
    """Not-a-number in one request's logits is its own error; the others never notice."""
    engine = load_pair(*pair, device=device, slots=3, max_length=64, draft_len=2)
    healthy = [spec("a", prompt_ids=(5, 6)), spec("b", prompt_ids=(7, 8, 9))]
    expected, *_ = finish_all(engine, healthy)
    poisoned = VOCAB - 1
    assert all(poisoned not in tokens for tokens in expected.values())
    with torch.no_grad():
        engine._pair.target.model.get_input_embeddings().weight[poisoned] = float("nan")
    output, last, _ = finish_all(
        engine, [healthy[0], spec("bad", prompt_ids=(4, poisoned, 3, 2)), healthy[1]]
    )
    assert last["bad"].finish is End.ERROR
    assert last["bad"].error == "the target's logits are not finite"
    assert output["bad"] == []
    assert {name: output[name] for name in "ab"} == expected
    assert all(pool._storage.isfinite().all() for pool in engine._pair.pools)


@pytest.mark.usefixtures("by_kernels_and_by_torch")
def test_a_request_whose_numbers_break_costs_few_passes_over_the_pools(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass reads and writes all KV of the worker."""
    engine = load_pair(*pair, device=device, slots=8, max_length=64, draft_len=2)
    poisoned = VOCAB - 1
    with torch.no_grad():
        engine._pair.target.model.get_input_embeddings().weight[poisoned] = float("nan")
    passes: list[KVPool] = []
    clean = KVPool.zero_nonfinite
    monkeypatch.setattr(KVPool, "zero_nonfinite", lambda pool: (passes.append(pool), clean(pool)))
    healthy = [spec(f"r{n}", prompt_ids=(5, 6 + n)) for n in range(7)]
    _, last, _ = finish_all(engine, [*healthy, spec("bad", prompt_ids=(4, poisoned, 3, 2))])
    assert [name for name in last if last[name].finish is End.ERROR] == ["bad"]
    assert max(map(passes.count, engine._pair.pools)) <= 2


@pytest.mark.parametrize("drafter", [Drafter.MODEL, Drafter.LOOKUP])
def test_a_draft_token_whose_numbers_break_ends_nothing(
    pair: tuple[Path, Path], device: str, drafter: Drafter
) -> None:
    """The draft proposes a token that the target never chooses, and whose row is not a number."""
    poisoned = VOCAB - 1
    sampling = Sampling(0.8, seed=3, logit_bias=((poisoned, -100.0),))
    specs = [spec(name, sampling=replace(sampling, seed=n), drafter=drafter) for n, name in enumerate("abc")]
    expected, *_ = finish_all(load_pair(pair[0], device=device, max_length=64, draft_len=0), specs)
    engine = load_pair(*pair, device=device, slots=3, max_length=64, draft_len=2)
    with torch.no_grad():
        engine._pair.target.model.get_input_embeddings().weight[poisoned] = float("nan")

    def proposes(*_: Any) -> Any:
        return Found([poisoned, poisoned], 2)

    for one in specs:
        engine.add(one)
    if drafter is Drafter.LOOKUP:
        for sequence in engine._sequences.values():
            assert sequence.lookup is not None
            sequence.lookup.look = proposes  # type: ignore[method-assign]
    else:
        verify = engine.rounds.verification.verify

        def of_another_draft(requests: Any, *more: Any) -> None:
            for request in requests:
                request.draft_tokens = [poisoned for _ in request.draft_tokens]
            verify(requests, *more)

        engine.rounds.verification.verify = of_another_draft  # type: ignore[method-assign]
    output: dict[str, list[int]] = {one.request_id: [] for one in specs}
    while live := [name for name in output if len(output[name]) < 12]:
        for report in engine.round(live).requests:
            assert report.error is None
            output[report.request_id].extend(report.tokens)
        engine.check()
    assert output == expected
    assert all(pool._storage.isfinite().all() for pool in engine._pair.pools)


def test_a_request_that_cannot_be_decoded_ends_alone(spoken_pair: tuple[Path, Path], device: str) -> None:
    engine = load_pair(*spoken_pair, device=device, slots=2, max_length=64, draft_len=2)
    engine.add(spec("bad", stop=("never",)))
    engine.add(spec("good"))

    def fails(*_: Any) -> None:
        raise ValueError("no such token")

    engine._sequences["bad"].stop_text.find = fails  # type: ignore[union-attr, method-assign, assignment]
    bad, good = engine.round(["bad", "good"]).requests
    assert (bad.finish, bad.error) == (End.ERROR, "the output cannot be decoded: no such token")
    assert good.finish is None and good.tokens


def test_running_out_of_memory_changes_nothing(pair: tuple[Path, Path], device: str) -> None:
    """First prefill uses smaller chunks; where that does not help the caller gets an error, and may continue
    with fewer requests.
    """
    specs = [spec(f"r{n}", prompt_ids=tuple(range(2, 80)), max_tokens=10) for n in range(4)]
    expected, *_ = finish_all(load_pair(*pair, device=device, slots=4, max_length=128, draft_len=3), specs)
    engine = load_pair(*pair, device=device, slots=4, max_length=128, draft_len=3)
    forward, rows = engine._pair.target.forward, 40

    def short_of_memory(ids: torch.Tensor, *more: Any) -> torch.Tensor:
        if ids.numel() > rows:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return forward(ids, *more)

    engine._pair.target.forward = short_of_memory  # type: ignore[method-assign]
    assert finish_all(engine, specs)[0] == expected
    assert engine.rounds.prefill.budget <= 40 < engine.options.prefill_chunk
    rows = 6
    for one in specs:
        engine.add(one)
    with pytest.raises(OutOfMemory, match="no memory for a round of 4 requests: tried to allocate 20 GiB"):
        engine.round([one.request_id for one in specs])
    assert all(engine.status(one.request_id).tokens == 78 for one in specs)
    rows = 1000
    output = {one.request_id: [] for one in specs}  # type: ignore[var-annotated]
    while live := [name for name in output if len(output[name]) < 10]:
        for report in engine.round(live).requests:
            output[report.request_id].extend(report.tokens)
    assert output == expected


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by steps"])
def test_a_draft_model_without_memory_reads_its_context_again(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The target is its own draft: all that it proposes is accepted, if it has read the whole context."""
    engine = load_pair(pair[0], pair[0], device=device, slots=1, max_length=128, draft_len=3)
    draft = engine._pair.draft
    assert draft is not None
    if not at_once:
        monkeypatch.setattr(type(draft), "proposes", False)

    def short_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    engine.add(spec("a", prompt_ids=tuple(range(2, 80)), max_tokens=20, drafter=Drafter.MODEL))
    engine.round(["a"])  # the prompt
    with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
        patch.setattr(draft, "forward", short_of_memory)
        patch.setattr(draft, "propose", short_of_memory)
        engine.round(["a"])
    reports = [engine.round(["a"]).requests[0] for _ in range(3)]
    assert [(report.drafted, report.accepted) for report in reports] == [(3, 3)] * 3


@pytest.mark.parametrize(
    ("error", "raised"),
    [(torch.OutOfMemoryError("tried to allocate 20 GiB"), OutOfMemory), (IndexError("7"), IndexError)],
)
def test_a_round_that_fails_takes_no_blocks(
    error: Exception, raised: type[Exception], pair: tuple[Path, Path], device: str
) -> None:
    """KV that was in host memory stays there, and a request that had none has none."""
    engine = load_pair(*pair, device=device, slots=3, max_length=128, draft_len=2)
    names = ("here", "away", "new")
    specs = [spec(name, prompt_ids=tuple(range(2 + n, 40)), max_tokens=10) for n, name in enumerate(names)]
    expected, *_ = finish_all(engine, specs)
    for one in specs:
        engine.add(one)
    output: dict[str, list[int]] = {name: [] for name in names}

    def run(*names: str) -> int:
        reports = engine.round(names).requests
        for report in reports:
            output[report.request_id].extend(report.tokens)
        return sum(report.prefilled for report in reports)

    for _ in range(2):  # the draft has its KV after the second
        run("here", "away")
    assert engine.swap_out("away")
    forward, before = engine._pair.target.forward, [engine.status(name) for name in names]

    def fails(*_: Any) -> torch.Tensor:
        raise error

    engine._pair.target.forward = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(raised):
        engine.round(names)
    after = [engine.status(name) for name in names]
    assert after[1:] == before[1:]
    assert [status.residency for status in after] == [Residency.DEVICE, Residency.HOST, Residency.NONE]
    engine.check()
    engine._pair.target.forward = forward  # type: ignore[method-assign]
    assert run("away") == 0, "its KV came back"
    while live := [name for name in names if len(output[name]) < 10]:
        run(*live)
    assert output == expected


def test_a_device_that_is_gone_is_told_as_such(pair: tuple[Path, Path], device: str) -> None:
    engine = load_pair(*pair, device=device, slots=1, max_length=64)
    engine.add(spec())

    def gone(*_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    engine._pair.target.forward = gone  # type: ignore[method-assign, assignment]
    with pytest.raises(DeviceFailed, match="device-side assert"):
        engine.round(["a"])


def test_stop_strings_need_a_tokenizer(pair: tuple[Path, Path]) -> None:
    engine = load_pair(pair[0], max_length=64)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        engine.add(spec(stop=("x",)))


def test_automatic_lengths_say_the_same(pair: tuple[Path, Path], device: str) -> None:
    """No fixed draft length, with requests that come, pause and go."""
    texts = []
    for draft_len in (None, 0):
        engine = load_pair(*pair, device=device, slots=4, max_length=128, draft_len=draft_len)
        specs = [spec(f"r{n}", sampling=Sampling(0.7, seed=n), max_tokens=40) for n in range(10)]
        texts.append(finish_all(engine, specs, rotate("keep"))[0])
    assert texts[0] == texts[1]


def test_a_round_that_ends_requests_is_counted_with_all_its_rows(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of rows is learnt from rounds, and a request has rows in its last round as in any other."""
    engine = load_pair(*pair, device=device, slots=4, max_length=64, draft_len=0)
    rows: list[int] = []
    monkeypatch.setattr(engine.lengths, "observe_costs", lambda count, *_, **__: rows.append(count))
    finish_all(engine, [spec(name, max_tokens=3) for name in "abcd"])
    assert rows == [4, 4], "the first round is all prefill, and tells nothing of what proposals cost"


def test_swapping_is_exact(pair: tuple[Path, Path], device: str) -> None:
    """The KV that comes back is bit for bit the KV that left, also when it lies in other blocks."""
    engine: SpeculativeEngine = load_pair(
        *pair, device=device, slots=2, blocks=40, block_size=4, max_length=64, draft_len=2
    )
    for name in "ab":
        engine.add(spec(name, prompt_ids=tuple(range(2, 20))))
    for _ in range(3):
        engine.round(["a", "b"])
    sequence = engine._sequences["a"]
    before = [
        pool.copy_out(place)
        for pool, place in zip(engine._pair.pools, engine._pair.tables(sequence), strict=True)
    ]
    held = list(sequence.target.blocks)
    assert engine.swap_out("a")
    engine._pair.pools[0].allocator.allocate(1)  # its old place is taken
    planner = engine.rounds.planner
    planner.hold(planner.plan([sequence], engine.lengths).requests)
    engine._pair.swap_in(sequence)
    after = [
        pool.copy_out(place)
        for pool, place in zip(engine._pair.pools, engine._pair.tables(sequence), strict=True)
    ]
    assert sequence.target.blocks != held
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


def counting(call: Callable[..., Any], rows: list[int]) -> Callable[..., Any]:
    """Return the same function, which also records the number of ids in each call."""

    def counted(ids: torch.Tensor, *more: Any) -> Any:
        rows.append(ids.numel())
        return call(ids, *more)

    return counted


def test_a_long_prompt_stalls_nobody(tmp_path: Path, device: str) -> None:
    """A prompt of 4000 tokens runs together with three requests: these continue in every single round.

    It is computed in chunks in the running requests' forward, first by the target and then by the draft, so
    no forward of either has more rows than a chunk and the rows of the running requests.
    """
    target = write_model(tmp_path / "target", llama_config(max_position_embeddings=8192), seed=0)
    draft = write_draft_of(target, tmp_path / "draft", noise=0.25, seed=1)
    engine = load_pair(
        target,
        draft,
        device=device,
        slots=4,
        max_length=4200,
        draft_len=3,
        max_draft_len=3,
        prefill_chunk=512,
    )
    rows: dict[str, list[int]] = {"target": [], "draft": []}
    for name, model in (("target", engine._pair.target), ("draft", engine._pair.draft)):
        for call in ("forward", "propose"):
            setattr(model, call, counting(getattr(model, call), rows[name]))
    running = ["a", "b", "c"]
    for name in running:
        engine.add(spec(name, sampling=Sampling(0.8, seed=ord(name)), max_tokens=100))
    for _ in range(2):
        engine.round(running)
    long = spec("long", prompt_ids=tuple(2 + n % 97 for n in range(4000)), max_tokens=10)
    engine.add(long)
    rows["target"].clear()
    rows["draft"].clear()
    rounds = []
    while not rounds or rounds[-1][-1].finish is None:
        rounds.append(engine.round([*running, "long"]).requests)
        assert all(report.tokens for report in rounds[-1][:3]), "a running request was stalled"
    chunks = [reports[-1].prefilled for reports in rounds]
    assert chunks[:8] == [512] * 7 + [4000 - 7 * 512] and not any(chunks[8:])
    assert [bool(reports[-1].tokens) for reports in rounds] == [False] * 7 + [True] * (len(rounds) - 7)
    assert len(rows["target"]) == len(rounds), "one forward of the target in each round"
    assert max(rows["target"]) <= 512 + 3 * 4
    assert max(rows["draft"]) <= 512 + 3 * 2
    assert rounds[-1][-1].drafted > 0 or rounds[-2][-1].drafted > 0, "the draft has caught up"
