"""An engine without a model: the same interface, real block accounting, scripted tokens and acceptance. No
torch.

For tests and simulations of everything around an engine; hundreds fit into one process. Its guarantees:

* A token is a hash of (prompt, seed, position), or the first allowed one from there: `FakeEngine.expected` returns the
  whole output in advance, and it does not depend on rounds, batches, preemption or migration.
* The acceptance of a draft token is a function of (seed, position) too. Each request has its own mean, drawn
  from its seed, so the number accepted in a round follows a truncated geometric distribution with that mean.
* Times are those of a cost model. They are virtual: reported, and slept only when `time_scale` is above 0.
* The prefix cache holds names instead of KV: what it has of a context is not prefilled.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from laps_sd.contract.ends import End
from laps_sd.contract.round_time import prefill_time_s
from worker_svc.engine.cache.blocks import BlockAllocator
from worker_svc.engine.cache.prompts import CachedPrompts, ContextNames
from worker_svc.engine.facts import facts
from worker_svc.engine.interface import (
    CacheChanges,
    Capacity,
    ComputedBy,
    LengthLearner,
    OutOfBlocks,
    PromptLogprobs,
    RequestRound,
    Residency,
    RoundResult,
    SequenceStatus,
    SharedBlocks,
    Specification,
    TokenLogprobs,
    UnknownRequest,
    blocks_needed,
    check_run,
    check_specification,
)
from worker_svc.engine.sampling.restrictions import Restrictions, restrictions_of
from worker_svc.engine.sampling.stopping import Decode, StopText, cut, stop_text_of
from worker_svc.fake.script import Lengths, Script, digest_of

__all__ = ["FakeCosts", "FakeEngine"]


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """Costs of a round, in virtual seconds. The defaults are of the order of a 7B target on one GPU."""

    round_s: float = 0.020  # a verification with nothing in it
    draft_step_s: float = 0.002  # one draft step of the whole batch
    verified_token_s: float = 0.00009  # per verified row (drafted + 1) of each request
    context_token_s: float = 3e-7  # per token of context that is attended to
    prefill_token_s: float = 0.00009
    swap_token_s: float = 0.00002  # per token, either way


@dataclass(slots=True)
class _Fake:
    """One known request."""

    spec: Specification
    digest: int
    acceptance: float  # chance that a draft token is accepted
    length: int  # output tokens after which it ends by EOS; the last of them is the EOS token
    stop_text: StopText | None
    restrictions: Restrictions | None
    output: list[int]
    names: ContextNames
    computed: int = 0  # context tokens whose KV exists; all but the last, once prefilled
    residency: Residency = Residency.NONE
    target: list[int] = field(default_factory=list)  # block ids
    draft: list[int] = field(default_factory=list)
    named: int = 0  # blocks at the start whose contents have a name
    noted: int = 0  # prompt blocks at the start that are noted as cached
    # Cached blocks that begin its context, while a round is planned.
    found: list[int] = field(default_factory=list)
    reused: int = 0  # tokens of those that it has taken, until they are reported
    finished: bool = False

    @property
    def tokens(self) -> int:
        return len(self.spec.prompt_ids) + len(self.output)

    @property
    def context(self) -> list[int]:
        return [*self.spec.prompt_ids, *self.output]

    @property
    def scores_prompt(self) -> bool:
        return self.spec.prompt_logprobs is not None and not self.output


class FakeEngine:
    """The scripted engine; see the module's docstring. The arguments mirror those of the real engine where
    both have them.

    `lengths` gives the output length after which a request ends by EOS (None: never before max_tokens);
    `draft_len` is proposed every round, capped by the request and by what is left; `acceptance` and
    `concentration` are mean and concentration of the Beta distribution of the requests' means; `host_tokens`
    is the budget of swapped-out context (None: no limit); contexts are found in the prefix cache from
    `prefix_reuse_tokens` on (0: never); `decode` makes stop strings work. `sleep` is called with total_s *
    time_scale after each round when time_scale is above 0. A round that runs a request with `deadly_seed`
    ends the process, as an error in a kernel would.
    """

    def __init__(
        self,
        *,
        slots: int = 8,
        target_blocks: int = 1024,
        draft_blocks: int | None = None,
        block_size: int = 16,
        max_length: int = 4096,
        max_draft_len: int = 8,
        draft_len: int = 4,
        vocab_size: int = 1024,
        eos_id: int = 0,
        acceptance: float = 0.68,
        concentration: float = 8.0,
        lengths: Lengths | None = None,
        prefill_chunk: int = 512,
        max_round_s: float | None = None,
        host_tokens: int | None = None,
        prefix_reuse_tokens: int = 0,
        costs: FakeCosts | None = None,
        time_scale: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        deadly_seed: int | None = None,
        adapters: Collection[str] = (),
        decode: Decode | None = None,
        fingerprint: str = "fake",
    ) -> None:
        self._script = Script(
            vocab_size=vocab_size,
            eos_id=eos_id,
            acceptance=acceptance,
            concentration=concentration,
            lengths=lengths,
        )
        self.capacity = Capacity(
            slots=slots,
            target_blocks=target_blocks,
            draft_blocks=target_blocks if draft_blocks is None else draft_blocks,
            block_size=block_size,
            max_length=max_length,
            max_draft_len=max_draft_len,
            vocab_size=vocab_size,
            device="fake",
            adapters=frozenset(adapters),
        )
        self.fingerprint = fingerprint
        self.facts = facts(
            "none, the tokens are scripted",
            "fake: no model runs, and rounds take the time of a cost model",
            self.capacity,
        )
        self.computed_by = ComputedBy("fake", "none", 0)
        self.length_probe: LengthLearner | None = None
        self._draft_len = min(draft_len, max_draft_len) if self.capacity.draft_blocks else 0
        self._eos_id = eos_id
        self._prefill_chunk = prefill_chunk
        self._max_round_s = max_round_s
        self._host_tokens = host_tokens
        self._least_reuse = prefix_reuse_tokens
        self._costs = costs or FakeCosts()
        self._time_scale = time_scale
        self._sleep = sleep
        self._deadly_seed = deadly_seed
        self._decode = decode
        self._target = BlockAllocator(self.capacity.target_blocks, together=False)
        self._prompts = CachedPrompts(self._target, block_size)
        self._draft = BlockAllocator(self.capacity.draft_blocks)
        self._requests: dict[str, _Fake] = {}

    # -- requests -----------------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> tuple[int, int]:
        """The free blocks of the target's pool and of the draft's."""
        return self._target.free_blocks, self._draft.free_blocks

    def add(self, spec: Specification) -> None:
        """Make a request known. Raises ValueError naming the field and its limit."""
        if spec.request_id in self._requests:
            raise ValueError(f"request_id {spec.request_id!r} is known already")
        check_specification(spec, self.capacity)
        if spec.format is not None:
            raise ValueError("format cannot be kept by the fake engine, whose tokens are scripted")
        digest = digest_of(spec)
        self._requests[spec.request_id] = _Fake(
            spec=spec,
            digest=digest,
            acceptance=self._script.mean_acceptance(digest),
            length=self._script.length(spec),
            stop_text=stop_text_of(spec, self._decode) if self._decode else None,
            restrictions=restrictions_of(spec, (self._eos_id,)),
            output=list(spec.committed_ids),
            names=ContextNames(spec.cache_salt),
        )

    def drop(self, request_id: str) -> None:
        """Forget a request and free what it holds; an unknown id is fine."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._release(request)

    def swap_out(self, request_id: str) -> bool:
        """Move the KV of a request to host memory.

        Returns False, and changes nothing, if the host budget is full.
        """
        request = self._get(request_id)
        if request.residency is not Residency.DEVICE:
            return True
        if self._host_tokens is not None:
            held = sum(
                other.computed for other in self._requests.values() if other.residency is Residency.HOST
            )
            if held + request.computed > self._host_tokens:
                return False
        computed = request.computed
        self._release(request)
        request.computed, request.residency = computed, Residency.HOST
        return True

    def evict(self, request_id: str) -> None:
        """Discard the KV of a request; its tokens stay known."""
        self._release(self._get(request_id))

    def expect(self, waiting: Sequence[str]) -> None:
        """Count as shared, in each `status`, what these requests will find and others hold."""
        starts = [self._owned(self._get(name)) for name in waiting]
        self._target.expect([start for start in starts if start[1]])

    def status(self, request_id: str) -> SequenceStatus:
        """Return the progress of a request. Raises UnknownRequest."""
        request, pool = self._get(request_id), self._target
        runs = pool.shared(request.target) if request.target else pool.will_share(*self._owned(request))
        return SequenceStatus(
            request.residency,
            request.tokens,
            len(request.target),
            len(request.draft),
            tuple([SharedBlocks(first, count, 0) for first, count in runs]),
        )

    def known(self) -> frozenset[str]:
        """Return the ids of all requests that were added and not dropped."""
        return frozenset(self._requests)

    def cached_blocks(self) -> bytes:
        """Return the names of all prompt blocks whose KV it has, the most recently used last."""
        return self._prompts.held()

    def cache_changes(self) -> CacheChanges:
        """Return the changes of `cached_blocks` since the last call."""
        return self._prompts.changes()

    def check(self) -> None:
        """Assert that every block is free, cached or held, and that a writable block has a single holder."""
        self._target.check(request.target for request in self._requests.values())
        self._draft.check(request.draft for request in self._requests.values())

    def expected(self, spec: Specification) -> tuple[tuple[int, ...], End]:
        """Return all output tokens of a request, regardless of committed ones, and the reason of its end."""
        digest, length = digest_of(spec), self._script.length(spec)
        restrictions = restrictions_of(spec, (self._eos_id,))
        tokens: list[int] = []
        for position in range(spec.max_tokens):
            tokens.append(self._script.token(digest, spec, length, position, restrictions, tokens))
        stop_text = stop_text_of(spec, self._decode) if self._decode else None
        end = cut(spec, 0, tokens, (self._eos_id,), stop_text, ())
        assert end.finish is not None
        return tuple(tokens[: end.tokens]), end.finish

    # -- a round ------------------------------------------------------------------------------------------------------------

    def round(self, run: Sequence[str]) -> RoundResult:
        """Run one draft and verify step over exactly these requests.

        See `interface.Engine.round` for the errors.
        """
        finished = {name for name in run if name in self._requests and self._requests[name].finished}
        check_run(run, self._requests.keys(), finished, self.capacity.slots)
        requests = [self._requests[name] for name in run]
        if any(request.spec.sampling.seed == self._deadly_seed for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self._find(requests)
            drafts = [self._draft_length(request) if self._decodes(request) else 0 for request in requests]
            chunks, limit_s = self._chunks(requests, drafts)
            self._grow(requests, chunks, drafts)
        finally:
            for request in requests:
                request.found = []

        costs = self._costs
        swapped = [
            request.computed - request.named * self.capacity.block_size
            for request in requests
            if request.residency is Residency.HOST
        ]
        swap_s = sum(swapped) * costs.swap_token_s
        for request, chunk in zip(requests, chunks, strict=True):
            if chunk or request.computed:
                request.residency = Residency.DEVICE
        draft_s, verify_s = self._plain_s(requests, drafts)
        prefill_s = sum(chunks) * costs.prefill_token_s
        total_s = draft_s + verify_s + prefill_s + swap_s
        reports = tuple(self._step(*entry) for entry in zip(requests, chunks, drafts, strict=True))
        if self._time_scale > 0:
            self._sleep(total_s * self._time_scale)
        return RoundResult(
            requests=reports,
            draft_s=draft_s,
            verify_s=verify_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            total_s=total_s,
            limit_s=limit_s,
            free_target_blocks=self._target.free_blocks,
            free_draft_blocks=self._draft.free_blocks,
        )

    def _find(self, requests: Sequence[_Fake]) -> None:
        """Look up the context of each request without KV on the device, but for its last token."""
        for request in requests:
            names, most = self._usable(request)
            found = self._target.find(names[:most])
            request.found = found if self._is_enough(len(found)) else []

    def _usable(self, request: _Fake) -> tuple[Sequence[bytes], int]:
        """Return the names of the blocks of a context, and how many of these a request without KV on the device can
        use: what it swapped out, or all but the last token.
        """
        if not self._least_reuse or request.target or request.scores_prompt:
            return (), 0
        size, names = self.capacity.block_size, request.names.kv
        if len(names) < request.tokens // size:
            names = request.names.kv_blocks(request.context, size)
        return names, (request.computed or request.tokens - 1) // size

    def _owned(self, request: _Fake) -> tuple[Sequence[bytes], int]:
        """Return the same names, and how many of these blocks a request will find while others hold them."""
        names, most = self._usable(request)
        owned = self._target.owned(names, most)
        return names, owned if self._is_enough(owned) else 0

    def _is_enough(self, blocks: int) -> bool:
        return blocks * self.capacity.block_size >= self._least_reuse

    def _remember(self, request: _Fake) -> None:
        """Add the full blocks of a request to the prefix cache."""
        full = request.computed // self.capacity.block_size
        if not self._least_reuse or full <= request.named:
            return
        context = request.context
        names = request.names.kv_blocks(context, self.capacity.block_size)
        for at in range(request.named, full):
            self._target.name(request.target[at], names[at])
        request.named = full
        request.noted = self._prompts.note(request.names, context, request.noted, request.named)

    def _known(self, request: _Fake) -> int:
        """Return the context tokens whose KV it has, or will have found."""
        return request.computed or len(request.found) * self.capacity.block_size

    def _decodes(self, request: _Fake) -> bool:
        """Return whether its KV covers all tokens but the last."""
        return 0 < self._known(request) >= request.tokens - 1

    def _plain_s(self, requests: Sequence[_Fake], drafts: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of drafting and of verification in a round, without prefill."""
        costs = self._costs
        rows = sum(
            length + 1
            for length, request in zip(drafts, requests, strict=True)
            if request.computed >= request.tokens - 1
        )
        context = sum(request.tokens for request in requests)
        verify_s = costs.round_s + rows * costs.verified_token_s + context * costs.context_token_s
        return max(drafts, default=0) * costs.draft_step_s, verify_s

    def _chunks(self, requests: Sequence[_Fake], drafts: Sequence[int]) -> tuple[list[int], float]:
        """Return the context tokens to prefill for each request, and the limit of the round's seconds; 0: it
        is not met.

        A request whose KV covers all tokens but the last prefills none.
        """
        left, limit_s = self._prefill_chunk, 0.0
        lacking = sum(
            request.tokens - self._known(request) for request in requests if not self._decodes(request)
        )
        if self._max_round_s is not None and lacking:
            plain_s = sum(self._plain_s(requests, drafts))
            seconds = prefill_time_s(self._max_round_s, plain_s, sum(map(self._decodes, requests)))
            fitting = max(1, int(seconds / self._costs.prefill_token_s))
            if fitting < min(left, lacking):
                left, limit_s = fitting, plain_s + seconds
        chunks = []
        for request in requests:
            known = self._known(request)
            missing = request.tokens - known
            chunk = min(missing, left) if missing > 1 or known == 0 else 0
            left -= chunk
            chunks.append(chunk)
        return chunks, limit_s

    def _draft_length(self, request: _Fake) -> int:
        cap = (
            self._draft_len
            if request.spec.max_draft_len is None
            else min(self._draft_len, request.spec.max_draft_len)
        )
        return min(cap, request.spec.max_tokens - len(request.output) - 1)

    def _grow(self, requests: Sequence[_Fake], chunks: Sequence[int], drafts: Sequence[int]) -> None:
        """Take the blocks that this round needs, or raise OutOfBlocks and take none."""
        wanted = []
        for request, chunk, draft_len in zip(requests, chunks, drafts, strict=True):
            starved = self._known(request) == 0 and chunk == 0  # no prefill budget was left for it
            needed = 0 if starved else blocks_needed(request.tokens, draft_len + 1, self.capacity.block_size)
            in_draft = needed if self.capacity.draft_blocks else 0
            held = len(request.target) + len(request.found)
            wanted.append((max(0, needed - held), max(0, in_draft - len(request.draft))))
        # Those found are free too while they have no owner.
        found = self._target.unowned(block for request in requests for block in request.found)
        for name, pool, count in (
            ("target", self._target, found + sum(target for target, _ in wanted)),
            ("draft", self._draft, sum(draft for _, draft in wanted)),
        ):
            if count > pool.free_blocks:
                raise OutOfBlocks(
                    f"the {name} pool has {pool.free_blocks} free KV blocks and this round needs {count}"
                )
        for request in requests:  # before others can take these blocks
            if request.found:
                self._target.share(request.found)
                request.target, request.named = request.found, len(request.found)
                if request.residency is Residency.NONE:
                    request.computed = request.reused = len(request.found) * self.capacity.block_size
        for request, (target, draft) in zip(requests, wanted, strict=True):
            request.target += self._target.extend(request.target, target)
            request.draft += self._draft.extend(request.draft, draft)

    def _step(self, request: _Fake, chunk: int, draft_len: int) -> RequestRound:
        position = len(request.output)
        request.computed += chunk
        cached, request.reused = min(request.reused, len(request.spec.prompt_ids)), 0
        if request.computed < request.tokens - 1 or (chunk == 0 and request.computed == 0):
            self._remember(request)
            return RequestRound(request.spec.request_id, position, (), 0, 0, prefilled=chunk, cached=cached)
        accepted = 0
        while accepted < draft_len and self._script.accepts(
            request.digest, request.spec.sampling.seed, request.acceptance, position + accepted
        ):
            accepted += 1
        block: list[int] = []
        restrictions = request.restrictions
        before = [] if restrictions is None else request.output[max(0, position - restrictions.reach) :]
        for at in range(position, position + accepted + 1):
            token = self._script.token(request.digest, request.spec, request.length, at, restrictions, before)
            block.append(token)
            before.append(token)
        end = cut(request.spec, position, block, (self._eos_id,), request.stop_text, request.output)
        of_prompt = (
            _prompt_logprobs(request.spec, self.capacity.vocab_size) if request.scores_prompt else None
        )
        request.output += block[: end.tokens]
        request.computed = request.tokens - 1
        self._remember(request)
        if end.finish is not None:
            request.finished = True
            self._release(request)
        return RequestRound(
            request_id=request.spec.request_id,
            position=position,
            tokens=tuple(block[: end.tokens]),
            drafted=draft_len,
            accepted=accepted,
            prefilled=chunk,
            cached=cached,
            finish=end.finish,
            cut_characters=end.cut_characters,
            # The token is certain: no other one could have been chosen.
            logprobs=(TokenLogprobs(0.0),) * end.tokens if request.spec.logprobs is not None else (),
            prompt_logprobs=of_prompt,
        )

    # -- helpers ------------------------------------------------------------------------------------------------------------

    def _get(self, request_id: str) -> _Fake:
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequest(request_id) from None

    def _release(self, request: _Fake) -> None:
        self._target.free(request.target)
        self._draft.free(request.draft)
        request.target, request.draft, request.computed, request.residency = [], [], 0, Residency.NONE
        request.named = request.noted = request.reused = 0


def _prompt_logprobs(spec: Specification, vocab_size: int) -> PromptLogprobs:
    """Return log probabilities with which each token of the prompt was certain, and all others impossible."""
    found = PromptLogprobs(min(spec.prompt_logprobs or 0, vocab_size))
    for token in spec.prompt_ids[1:]:
        others = (other for other in range(vocab_size) if other != token)
        found.logprobs.append(0.0)
        found.ranks.append(1)
        found.alternative_ids.extend([token, *islice(others, found.alternatives)][: found.alternatives])
        found.alternative_logprobs.extend([0.0, *[-math.inf] * found.alternatives][: found.alternatives])
    return found
