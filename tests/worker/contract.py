"""The contract of interface.Engine, held by every engine: each engine's tests run this class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from laps_sd.contract.ends import End
from tests.worker.drive import finish_all
from worker_svc.engine.interface import (
    Capacity,
    Engine,
    OutOfBlocks,
    Residency,
    Sampling,
    SequenceStatus,
    Specification,
    UnknownRequest,
    blocks_needed,
)

__all__ = ["EngineContract", "Make", "decode", "spec"]

Make = Callable[..., Engine]
"""Makes an engine, by options: slots, blocks, prefill_chunk."""


def decode(ids: Any) -> str:
    """The text of tokens for stop strings: token i reads " w{i}"."""
    return "".join(f" w{i}" for i in ids)[1:]


def spec(name: str = "a", **changes: Any) -> Specification:
    values: dict[str, Any] = {
        "request_id": name, "prompt_ids": (5, 6, 7, 8, 9), "committed_ids": (), "sampling": Sampling(0.8, seed=3), "max_tokens": 12,
        "ignore_eos": True,
    }  # fmt: skip
    return Specification(**{**values, **changes})


WRONG: list[tuple[Callable[[Capacity], dict[str, Any]], str]] = [
    (lambda _: {"adapter": "sql"}, r"adapter 'sql' is not among this worker's \(LAPS_SD_ADAPTERS\): none"),
    (lambda _: {"prompt_ids": ()}, "prompt_ids must hold"),
    (lambda c: {"prompt_ids": (c.vocab_size,)}, "prompt_ids must be token ids from 0 to {last_id}"),
    (lambda _: {"prompt_ids": (-1,)}, "prompt_ids"),
    (lambda c: {"committed_ids": (c.vocab_size,)}, "committed_ids"),
    (lambda _: {"committed_ids": (1,) * 12}, "committed_ids holds 12 tokens, max_tokens allows 12"),
    (lambda _: {"max_tokens": 0}, "max_tokens must be at least 1"),
    (
        lambda c: {"max_tokens": c.max_length - 4},
        "max_tokens: 5 prompt tokens and {too_many} output tokens exceed the longest context of {max_length}",
    ),
    (lambda _: {"sampling": Sampling(-1.0)}, "sampling.temperature"),
    (lambda _: {"sampling": Sampling(float("nan"))}, "sampling.temperature"),
    (lambda _: {"sampling": Sampling(9e-6)}, "sampling.temperature"),
    (lambda _: {"sampling": Sampling(1.0, top_p=0.0)}, "sampling.top_p"),
    (lambda _: {"sampling": Sampling(1.0, top_k=-1)}, "sampling.top_k"),
    (lambda _: {"sampling": Sampling(1.0, seed=2**64)}, "sampling.seed"),
    (lambda _: {"sampling": Sampling(1.0, min_p=1.5)}, "sampling.min_p must be from 0 to 1"),
    (lambda _: {"sampling": Sampling(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
    (lambda _: {"sampling": Sampling(presence_penalty=float("nan"))}, "sampling.presence_penalty"),
    (
        lambda _: {"sampling": Sampling(frequency_penalty=-3.0)},
        "sampling.frequency_penalty must be from -2 to 2",
    ),
    (
        lambda c: {"sampling": Sampling(logit_bias=((c.vocab_size, 1.0),))},
        "sampling.logit_bias must name token ids",
    ),
    (
        lambda _: {"sampling": Sampling(logit_bias=((1, 101.0),))},
        "sampling.logit_bias must be from -100 to 100",
    ),
    (lambda _: {"sampling": Sampling(min_tokens=13)}, "sampling.min_tokens must be at most max_tokens"),
    (lambda c: {"stop_token_ids": (c.vocab_size,)}, "stop_token_ids must name token ids"),
    (lambda _: {"stop_token_ids": (1,) * 65}, "stop_token_ids holds 65 entries, at most 64"),
    (lambda _: {"sampling": Sampling(bad_words_ids=((),))}, "sampling.bad_words_ids must hold lists of 1 to"),
    (
        lambda c: {"sampling": Sampling(allowed_token_ids=(c.vocab_size,))},
        "sampling.allowed_token_ids must name token ids",
    ),
    (lambda _: {"logprobs": 65}, "logprobs must be from 0 to 64"),
    (lambda _: {"prompt_logprobs": 65}, "prompt_logprobs must be from 0 to 64"),
    (lambda _: {"stop": ("",)}, "stop strings must have 1 to"),
    (lambda _: {"stop": ("x",) * 17}, "stop holds 17 strings"),
    (lambda _: {"max_draft_len": -1}, "max_draft_len"),
    (lambda _: {"request_id": ""}, "request_id"),
]


class EngineContract:
    """A subclass has a fixture `make`; without options its engine has these sizes."""

    blocks = 64
    draft_len = 3
    """Draft tokens of a request that nothing limits."""
    draft_pool = True
    """The draft model has blocks of its own."""
    swaps = True
    """KV can be ordered to host memory."""
    budget_without_drafts = True
    """Draft tokens do not count for the budget of prefill; those of vLLM do."""

    def test_an_engine_is_an_engine(self, make: Make) -> None:
        engine = make()
        assert isinstance(engine, Engine)
        assert engine.capacity.target_blocks == self.blocks
        assert engine.capacity.draft_blocks == (self.blocks if self.draft_pool else 0)
        assert engine.fingerprint

    def test_add_allocates_nothing(self, make: Make) -> None:
        engine = make()
        engine.add(spec())
        assert engine.known() == {"a"}
        status = engine.status("a")
        assert (status.residency, status.tokens, status.target_blocks, status.draft_blocks) == (
            Residency.NONE,
            5,
            0,
            0,
        )

    @pytest.mark.parametrize(("changes", "words"), WRONG)
    def test_bad_specifications_name_the_field_and_the_limit(
        self, make: Make, changes: Callable[[Capacity], dict[str, Any]], words: str
    ) -> None:
        engine = make()
        capacity = engine.capacity
        words = words.format(
            last_id=capacity.vocab_size - 1,
            max_length=capacity.max_length,
            too_many=capacity.max_length - 4,
        )
        with pytest.raises(ValueError, match=words):
            engine.add(replace(spec(), **changes(capacity)))
        assert not engine.known()

    def test_what_can_never_fit_the_pool_is_refused_at_once(self, make: Make) -> None:
        engine = make(blocks=4)
        capacity = engine.capacity
        room = 4 * capacity.block_size - capacity.lookahead
        with pytest.raises(
            ValueError, match=f"do not fit the target KV pool of 4 blocks of {capacity.block_size}"
        ):
            engine.add(spec(max_tokens=room - 5 + 1))
        engine.add(spec(max_tokens=room - 5))

    def test_an_id_is_added_once(self, make: Make) -> None:
        engine = make()
        engine.add(spec())
        with pytest.raises(ValueError, match="known already"):
            engine.add(spec())

    def test_runs_that_make_no_sense(self, make: Make) -> None:
        engine = make(slots=2)
        for name in "abc":
            engine.add(spec(name))
        with pytest.raises(UnknownRequest, match="unknown request 'z'"):
            engine.round(["a", "z"])
        with pytest.raises(ValueError, match="twice"):
            engine.round(["a", "a"])
        with pytest.raises(ValueError, match="2 slots"):
            engine.round(["a", "b", "c"])
        for call in (engine.status, engine.evict, engine.swap_out):
            with pytest.raises(UnknownRequest):
                call("z")
        engine.drop("z")
        assert engine.round([]).requests == ()

    def test_a_finished_request_stays_known_without_kv_until_it_is_dropped(self, make: Make) -> None:
        engine = make()
        engine.add(spec(max_tokens=1))
        (report,) = engine.round(["a"]).requests
        assert (report.position, len(report.tokens), report.finish) == (0, 1, End.LENGTH)
        status = engine.status("a")
        assert (status.residency, status.tokens, status.target_blocks, status.draft_blocks) == (
            Residency.NONE,
            6,
            0,
            0,
        )
        with pytest.raises(ValueError, match="has finished"):
            engine.round(["a"])
        engine.drop("a")
        assert not engine.known()

    def test_the_first_round_prefills_and_gives_the_first_token(self, make: Make) -> None:
        engine = make()
        engine.add(spec())
        (report,) = engine.round(["a"]).requests
        assert (report.prefilled, len(report.tokens), report.drafted) == (5, 1, 0)
        (report,) = engine.round(["a"]).requests
        assert (report.prefilled, report.position, report.drafted) == (0, 1, self.draft_len)

    def test_prefill_shares_one_budget_in_rank_order(self, make: Make) -> None:
        """A budget of 8 for contexts of 5, 6 and 7 tokens: the first is done at once, the second needs two
        rounds, the third three."""
        engine = make(prefill_chunk=8)
        drafts = None if self.budget_without_drafts else 0
        for name, length in (("a", 5), ("b", 6), ("c", 7)):
            engine.add(spec(name, prompt_ids=tuple(range(2, 2 + length)), max_draft_len=drafts))
        chunks = [
            [(r.prefilled, len(r.tokens)) for r in engine.round(["a", "b", "c"]).requests] for _ in range(3)
        ]
        assert chunks[0] == [(5, 1), (3, 0), (0, 0)]
        # Where it counts, the next token of the first request does too.
        left = 8 - 3 - (0 if self.budget_without_drafts else 1)
        assert chunks[1][1:] == [(3, 1), (left, 0)]
        assert chunks[2][2] == (7 - left, 1)

    def test_log_probabilities_of_a_prompt_come_with_its_first_token(self, make: Make) -> None:
        engine = make(prefill_chunk=4)
        finished = finish_all(engine, [spec("a", prompt_logprobs=2), spec("b", prompt_logprobs=0), spec("c")])
        found = {
            report.request_id: (report.position, report.prompt_logprobs)
            for report in finished[2]
            if report.prompt_logprobs is not None
        }
        assert set(found) == {"a", "b"}
        for name, alternatives in (("a", 2), ("b", 0)):
            position, of_prompt = found[name]
            assert position == 0
            assert of_prompt is not None and of_prompt.alternatives == alternatives
            assert len(of_prompt.logprobs) == len(of_prompt.ranks) == 4
            assert len(of_prompt.alternative_ids) == len(of_prompt.alternative_logprobs) == 4 * alternatives
            assert min(of_prompt.ranks) >= 1

    def test_blocks_follow_the_context(self, make: Make) -> None:
        engine = make()
        size, growth = engine.capacity.block_size, self.draft_len + 1 + engine.capacity.lookahead
        engine.add(spec(max_tokens=3 * size))
        while True:
            before = engine.status("a").tokens
            result = engine.round(["a"])
            if result.requests[0].finish:
                break
            status = engine.status("a")
            assert status.residency is Residency.DEVICE
            assert blocks_needed(status.tokens, 1, size) - 1 <= status.target_blocks
            assert status.target_blocks <= blocks_needed(before, growth, size)
            assert status.target_blocks + result.free_target_blocks == self.blocks
            assert engine.free_blocks == (result.free_target_blocks, result.free_draft_blocks)
            if self.draft_pool:
                assert status.draft_blocks + result.free_draft_blocks == self.blocks
        assert result.free_target_blocks == self.blocks
        assert result.free_draft_blocks == (self.blocks if self.draft_pool else 0)

    @pytest.mark.parametrize("how", ["drop", "evict"])
    def test_free_blocks_are_those_of_now(self, make: Make, how: str) -> None:
        engine = make()
        everything = (engine.capacity.target_blocks, engine.capacity.draft_blocks)
        assert engine.free_blocks == everything
        engine.add(spec())
        result = engine.round(["a"])
        assert engine.free_blocks == (result.free_target_blocks, result.free_draft_blocks)
        assert engine.free_blocks < everything
        getattr(engine, how)("a")
        assert engine.free_blocks == everything

    @pytest.mark.parametrize("how", ["swap", "evict"])
    def test_out_of_blocks_changes_nothing(self, make: Make, how: str) -> None:
        """Three requests of 5 blocks in a pool of 8: the impossible round is refused, and continues when one
        request has left.
        """
        engine = make(blocks=8)
        size = engine.capacity.block_size
        specs = [
            spec(
                name,
                sampling=Sampling(0.8, seed=ord(name)),
                prompt_ids=tuple(range(5, 4 + 2 * size)),
                max_tokens=3 * size - engine.capacity.lookahead,
            )
            for name in "abc"
        ]
        for one in specs:
            engine.add(one)
        output: dict[str, list[int]] = {name: [] for name in "abc"}

        def run(names: str) -> None:
            for report in engine.round(list(names)).requests:
                output[report.request_id].extend(report.tokens)

        run("ab")
        before = [engine.status(name) for name in "abc"]
        with pytest.raises(OutOfBlocks, match="pool has"):
            for _ in range(3 * size):
                before = [engine.status(name) for name in "abc"]
                run("abc")
        assert [engine.status(name) for name in "abc"] == before
        engine.check()  # type: ignore[attr-defined]
        for name in "ab":
            if how == "swap" and self.swaps:
                assert engine.swap_out(name)
                assert engine.status(name).residency is Residency.HOST
            else:
                assert self.swaps or not engine.swap_out(name)
                engine.evict(name)
                assert engine.status(name).residency is Residency.NONE
        for name in "cab":
            while len(output[name]) < specs[0].max_tokens:
                run(name)
            engine.drop(name)
        expected, *_ = finish_all(make(), specs)
        assert output == expected

    def test_an_evicted_request_is_prefilled_again(self, make: Make) -> None:
        engine = make()
        engine.add(spec())
        for _ in range(3):
            engine.round(["a"])
        tokens = engine.status("a").tokens
        engine.evict("a")
        assert engine.status("a") == SequenceStatus(Residency.NONE, tokens, 0, 0)
        (report,) = engine.round(["a"]).requests
        assert (report.prefilled, len(report.tokens)) == (tokens, 1)

    @pytest.mark.parametrize(("cap", "longest"), [(0, 0), (1, 1), (None, None), (100, None)])
    def test_a_request_caps_its_own_drafts(self, make: Make, cap: int | None, longest: int | None) -> None:
        longest = self.draft_len if longest is None else longest
        _, _, reports = finish_all(make(), [spec(max_draft_len=cap)])
        assert max(report.drafted for report in reports) == longest

    def test_drafts_do_not_go_beyond_max_tokens(self, make: Make) -> None:
        for max_tokens in range(1, 9):
            output, last, reports = finish_all(make(), [spec(max_tokens=max_tokens)])
            assert len(output["a"]) == max_tokens
            assert last["a"].finish is End.LENGTH
            assert all(report.position + report.drafted < max_tokens for report in reports)

    def test_a_stop_token_ends_the_text(self, make: Make) -> None:
        """It is the last token reported, wherever in a block of accepted tokens it comes."""
        whole = finish_all(make(), [spec(max_tokens=30)])[0]["a"]
        for token in dict.fromkeys(whole[3:9]):
            output, last, _ = finish_all(make(), [spec(max_tokens=30, stop_token_ids=(token,))])
            assert output["a"] == whole[: whole.index(token) + 1]
            assert last["a"].finish is End.STOP

    @pytest.mark.parametrize("cap", [0, None])
    def test_restrictions_hold_at_every_position(self, make: Make, cap: int | None) -> None:
        """Also from committed tokens on, which another worker made."""
        whole = finish_all(make(), [spec(max_tokens=24)])[0]["a"]
        stop = whole[1]
        sampling = Sampling(0.8, seed=3, min_tokens=9, bad_words_ids=((whole[3],), tuple(whole[4:6])))
        one = spec(max_tokens=24, max_draft_len=cap, sampling=sampling, stop_token_ids=(stop,))
        output, last, _ = finish_all(make(), [one])
        tokens = output["a"]
        assert stop not in tokens[:9]
        assert len(tokens) == 24 or (len(tokens) > 9 and tokens[-1] == stop)
        assert whole[3] not in tokens
        assert list(whole[4:6]) not in [tokens[at : at + 2] for at in range(len(tokens))]
        again, end, _ = finish_all(make(), [replace(one, committed_ids=tuple(tokens[:7]))])
        assert (again["a"], end["a"].finish) == (tokens, last["a"].finish)

    def test_only_allowed_tokens_are_chosen(self, make: Make) -> None:
        allowed = (7, 20, 33)
        sampling = Sampling(0.8, seed=3, allowed_token_ids=allowed)
        output, *_ = finish_all(make(), [spec(sampling=sampling)])
        assert set(output["a"]) <= set(allowed)

    def test_a_stop_string_does_not_count_before_min_tokens(self, make: Make) -> None:
        whole = finish_all(make(), [spec(max_tokens=30)])[0]["a"]
        stop = decode(whole[2:4])
        sampling = Sampling(0.8, seed=3, min_tokens=10)
        output, last, _ = finish_all(make(), [spec(max_tokens=30, sampling=sampling, stop=(stop, "w"))])
        assert output["a"] == whole[:11]
        assert last["a"].finish is End.STOP_SEQUENCE

    def test_an_included_stop_string_stays(self, make: Make) -> None:
        whole = finish_all(make(), [spec(max_tokens=30)])[0]["a"]
        text = decode(whole)
        stop = text[9:14]
        output, last, _ = finish_all(
            make(), [spec(max_tokens=30, stop=(stop,), include_stop_str_in_output=True)]
        )
        seen = decode(output["a"])
        assert seen[: len(seen) - last["a"].cut_characters] == text[: text.find(stop) + len(stop)]

    def test_a_stop_string_ends_the_text(self, make: Make) -> None:
        """Text is cut where the first stop string begins; tokens up to the one that completes it are
        reported.
        """
        whole, *_ = finish_all(make(), [spec(max_tokens=30)])
        text = decode(whole["a"])
        for begin, end in ((9, 14), (17, 19), (30, 44)):
            stop = text[begin:end]
            output, last, _ = finish_all(make(), [spec(max_tokens=30, stop=("never this", stop))])
            tokens, report = output["a"], last["a"]
            assert report.finish is End.STOP_SEQUENCE
            assert tokens == whole["a"][: len(tokens)]
            seen = decode(tokens)
            assert seen[: len(seen) - report.cut_characters] == text[: text.find(stop)]
            assert stop not in decode(tokens[:-1])
