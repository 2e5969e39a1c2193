"""Runs a Hugging Face decoder on packed, ragged rows over our KV pool.

Any decoder of transformers that uses its attention interface will do: we register an attention function that
reads and writes the pool, and all its inputs are keyword arguments of the forward. Models that cannot work
are refused with one sentence: recurrent layers (no rollback), soft-capped scores, sinks. Because some
architectures take the interface and ignore it, every model is compared with its own plain forward before it
serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from worker_svc.engine.cache.kv import KV_TILE, KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.attention import attend
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.models.fused_llama import FusedLlama
from worker_svc.engine.models.hidden import HiddenRows, hidden_size, taken_from
from worker_svc.engine.models.linears import LinearStore
from worker_svc.engine.models.plan import KernelPlanner, Piece, Plan
from worker_svc.engine.models.reach import FULL, Reach
from worker_svc.engine.models.segments import MIN_ROWS, Planner, exact_spans
from worker_svc.engine.models.shape import INSTEAD, lengths_within, shape_of, shrunk
from worker_svc.engine.quantisation.linear import QuantisedLinear, kinds_of, parameters_of, quantised_bytes

ATTENTION = "laps_sd_pool"
# tokens of the longest sequence of the check at loading, whatever the context length of the settings
CHECKED = 11


# Names in configurations of models that compute each row with a part of their weights.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) not in (None, 0, 1) for name in EXPERTS)  # 1: of a dense model


def _bytes_read(model: Any) -> int | None:
    """Return the bytes of all weights but those of an embedding, of which a row reads its own part only."""
    if _has_experts(model):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    total = quantised_bytes(model) + sum(int(weight.nbytes) for weight in model.parameters())
    tied = head is None or (
        not isinstance(head, QuantisedLinear) and head.weight.data_ptr() == embedding.weight.data_ptr()
    )
    return total if tied else total - int(embedding.weight.nbytes)


def _pool_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, total, size], rotated
    key: torch.Tensor,  # [1, kv_heads, total, size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    laps_sd_pool: KVPool,
    laps_sd_plan: Plan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [total, heads, size]
    attended = attend(q, k, v, laps_sd_pool, layer, laps_sd_plan, scale)
    return attended.contiguous()[None], None  # as transformers' own functions return it


AttentionInterface.register(ATTENTION, _pool_attention)


class _Check(NamedTuple):
    """The forward that packed forwards are compared with."""

    lengths: tuple[str, ...]  # of the configuration that are SHRUNK
    where: str  # contexts for which it stands, in words
    reaches: tuple[Reach, ...]  # of each layer
    expected: list[torch.Tensor]  # logits [tokens, vocab] of each text


class PackedModel:
    """A decoder whose forward takes packed rows of many sequences. Give it a pool with `attach` before
    `forward`."""

    def __init__(self, model: Any, *, role: str, max_length: int, deterministic: bool | None) -> None:
        """Take a model over.

        `deterministic`: make a row's numbers independent of other rows, on a CPU; None: in float32, and in
        bfloat16 where `kernels` can compute all. Raises ModelError if it is True and the model has experts: the rows
        of an expert are one product, and their number depends on the batch.
        """
        experts = _has_experts(model)
        if deterministic and experts:
            raise ModelError(
                f"deterministic needs a {role} model without experts, whose products depend on the batch; leave the "
                "setting out"
            )
        self.model = model.eval()
        self.role = role
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.parameters = parameters_of(model)
        self.quantised = kinds_of(model)  # kinds of quantised weights, in words
        self.bytes_read = _bytes_read(model)  # of weights, in a forward of one row; None: depends on the row
        self.pool: KVPool
        self.planner: Planner | KernelPlanner
        self.shape = shape_of(model, role=role, max_length=max_length)
        self.hidden_size = hidden_size(model)  # None: `forward` cannot copy hidden states out
        # True if attention is computed by `kernels`: any pieces together cost as much as one by one.
        self.by_kernels = not self.shape.limits and kernels.serve(
            self.device, self.dtype, self.shape.head_size
        )
        if deterministic is None:
            deterministic = (self.device.type == "cpu" and self.dtype == torch.float32 and not experts) or (
                self.dtype == torch.bfloat16
                and self.by_kernels
                and FusedLlama.serves(model)
                and FusedLlama.fits_kernels(
                    model, self.shape.heads, self.shape.kv_heads, self.shape.head_size
                )
            )
        self.deterministic = deterministic
        self._min_rows = MIN_ROWS if deterministic else 1  # that a forward computes
        self.all_by_kernels = False  # the same for all between the embedding and the last product
        self.independent = True  # False: a product's rows were found to depend on each other
        self._max_length = max_length
        self._fused: FusedLlama | None = None
        self._spans: tuple[int, ...] | None = (KV_TILE,) if deterministic else None
        model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def optimise(self, *, fused: bool) -> None:
        """Re-lay the weights for this device, if `fused` for `FusedLlama` where it serves. Before `attach`."""
        store = LinearStore(deterministic=self.deterministic, dtype=self.dtype)
        if fused and FusedLlama.serves(self.model):
            shape = self.shape
            self._fused = FusedLlama(
                self.model,
                store,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                size=shape.head_size,
                max_length=max(self._max_length, CHECKED),
                by_kernels=self.by_kernels,
            )
        else:
            store.apply(self.model)
        if self.deterministic and not self.by_kernels:
            self._spans = exact_spans(
                group=self.shape.heads // self.shape.kv_heads,
                kv_heads=self.shape.kv_heads,
                size=self.shape.head_size,
                dtype=self.dtype,
                device=self.device,
            )
        self.all_by_kernels = self._fused is not None and self._fused.by_kernels
        self._min_rows = (store.least_rows if self.all_by_kernels else MIN_ROWS) if self.deterministic else 1
        if self.device.type == "cpu" and kernels.MISSED:
            logging.getLogger(__name__).warning(
                "the %s model runs by torch's operators, at half the speed: this package was built without a C compiler",
                self.role,
            )
        self.independent = store.independent
        if not self.independent:
            logging.getLogger(__name__).warning(
                "the %s model's products depend on the batch on this machine: equal seeds may give different text",
                self.role,
            )

    def new_pool(self, *, blocks: int, block_size: int, region_tokens: int) -> KVPool:
        """Return a KV pool for this model; `attach` makes it the one in use."""
        return KVPool(
            layers=self.shape.layers,
            heads=self.shape.kv_heads,
            head_size=self.shape.head_size,
            blocks=blocks,
            block_size=block_size,
            region_tokens=region_tokens,
            dtype=self.dtype,
            device=self.device,
        )

    def attach(self, pool: KVPool, reaches: Sequence[Reach] | None = None) -> None:
        """Use this pool from now on. `reaches`: of each layer, if not the model's own."""
        self.pool = pool
        if self.by_kernels:
            self.planner = KernelPlanner(pool, min_rows=self._min_rows, flat=not self.all_by_kernels)
            return
        self.planner = Planner(
            pool,
            group=self.shape.heads // self.shape.kv_heads,
            dtype=self.dtype,
            spans=self._spans,
            min_rows=self._min_rows,
            reaches=self.shape.reaches if reaches is None else reaches,
        )

    def forward(
        self,
        ids: torch.Tensor,
        plan: Plan,
        logit_rows: torch.Tensor | None,
        hidden: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Return logits [rows, vocab] of the packed rows `logit_rows` (None: all); keys and values of all
        rows go to the pool, and the states of the rows in `hidden` to it.

        `ids` [total] int64 in packed order.
        """
        wanted = logit_rows
        if wanted is not None and wanted.numel() < self._min_rows:
            # The output layer is a product like any other.
            wanted = wanted.repeat(self._min_rows)[: self._min_rows]
        if self._fused is not None:
            logits = self._fused.forward(ids, plan, self.pool, wanted, hidden)
        elif hidden is not None:
            with taken_from(self.model, hidden):
                logits = self._full_forward(ids, plan, wanted)
        else:
            logits = self._full_forward(ids, plan, wanted)
        return logits if logit_rows is None else logits[: logit_rows.numel()]

    @property
    def exact(self) -> bool:
        """True if a row's numbers do not depend on other rows, so that equal seeds give equal text."""
        exact = self.dtype == torch.float32 or self.all_by_kernels
        return self.deterministic and self.independent and exact

    @property
    def path(self) -> str:
        """The code that computes this model: all_in_c, attention_in_c or torch."""
        if self.all_by_kernels:
            return "all_in_c"
        return "attention_in_c" if self.by_kernels else "torch"

    @property
    def path_in_words(self) -> str:
        """The code that computes this model, and the reason if it is not the fastest path."""
        if self.all_by_kernels:
            return "all layers by the kernels in C"
        steps = (
            "torch"
            if self._fused is not None
            else f"transformers, since {self.kind} has no short forward here"
        )
        if self.by_kernels:
            return f"attention by the kernels in C, the rest by {steps}"
        if self.device.type != "cpu":
            return f"torch's operators on {self.device}, layers by {steps}"
        reason = kernels.why_not(self.device, self.dtype, self.shape.head_size)
        if self.shape.limits:
            reason = f"they attend to all tokens, and layers attend to {self.shape.limits[0].words}"
        return f"torch's operators in place of the kernels in C ({reason}), layers by {steps}"

    @property
    def proposes(self) -> bool:
        """True if `propose` can be called."""
        return self.all_by_kernels

    def propose(
        self,
        ids: torch.Tensor,
        plan: Plan,
        drafts: Sequence[kernels.Draft],
        choosing: kernels.Choosing | None,
        vocabulary: int,
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Run all draft steps in one call, the first of them the forward of `ids` and `plan`; see
        `kernels.Decoder.propose`.
        """
        assert self._fused is not None and self._fused.decoder is not None and plan.pieces is not None
        return self._fused.decoder.propose(
            ids, plan.pieces, self.pool.layers, drafts, choosing, vocabulary, ends
        )

    def _full_forward(self, ids: torch.Tensor, plan: Plan, logit_rows: torch.Tensor | None) -> torch.Tensor:
        out = self.model(
            input_ids=ids[None],
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            laps_sd_pool=self.pool,
            laps_sd_plan=plan,
        )
        return out.logits[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def self_check(self, *, fused: bool) -> None:
        """Take the model's plain forward, then `optimise`, and compare packed forwards with it. Raises
        ModelError if they differ.

        Two sequences: prefilled in ragged chunks side by side, then one more token each. Where layers do not
        see the whole of the longest context, it is done again with windows and chunks so short that the
        sequences pass them: the same code as beyond the real ones runs, at the price of a few tokens.

        In half precision rounding decides between two experts that a router likes equally well, and
        transformers' own ways to compute attention differ in some rows. So half of the rows may differ there.
        """
        discrete = self.dtype != torch.float32 and _has_experts(self.model)
        generator = torch.Generator().manual_seed(0)
        texts = [
            torch.randint(self.shape.vocab_size, (n,), generator=generator).to(self.device)
            for n in (CHECKED, 7)
        ]
        lengths = lengths_within(self.model, self._max_length)
        hidden = HiddenRows(self.shape.layers // 2, [0])
        with nullcontext() if self.hidden_size is None else taken_from(self.model, hidden):
            checks = [_Check((), "", self.shape.reaches, self._plain(texts))]
        if hidden.states.shape != (1, self.hidden_size):
            self.hidden_size = None
        if lengths or self.shape.limits:
            checks.append(self._short_check(lengths, texts))
        self.optimise(fused=fused)
        for check in checks:
            with shrunk(self.model, check.lengths):
                differences = self._packed_differences(texts, check)
            worst = float(differences.median() if discrete else differences.max())
            scale = max(float(logits.abs().max()) for logits in check.expected)
            tolerance = (1e-4 if self.dtype == torch.float32 else 0.06) * max(1.0, scale)
            if not worst <= tolerance:
                raise ModelError(
                    f"the {self.role} model ({self.kind}) computes something else when packed than by itself"
                    f"{check.where} (logits differ by {worst:.2g}): {INSTEAD}"
                )

    def _short_check(self, lengths: dict[str, int], texts: Sequence[torch.Tensor]) -> _Check:
        """Return the check with these lengths of the configuration SHRUNK."""
        with shrunk(self.model, tuple(lengths)):
            short = shape_of(self.model, role=self.role, max_length=CHECKED)
            for real, tried in zip(self.shape.reaches, short.reaches, strict=True):
                if real != FULL and tried == FULL:
                    raise ModelError(
                        f"the {self.role} model ({self.kind}) has {real.words}, which cannot be checked: {INSTEAD}"
                    )
            expected = self._plain(texts)
        limits = [reach.limit for reach in self.shape.limits if reach.limit is not None]
        least = min([*lengths.values(), *limits])
        return _Check(tuple(lengths), f" in contexts of {least} tokens and more", short.reaches, expected)

    def _plain(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the logits [tokens, vocab] of texts by transformers' own forward."""
        # Attention with parts that SDPA lacks has an eager form only.
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        try:
            return [self.model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        finally:
            self.model.set_attn_implementation(ATTENTION)

    def _packed_differences(self, texts: Sequence[torch.Tensor], check: _Check) -> torch.Tensor:
        """Return the largest difference of a packed forward's logits from the expected ones, of each row."""
        cuts = ((0, 5, 10, CHECKED), (0, 6, 6, 7))
        self.attach(self.new_pool(blocks=4, block_size=8, region_tokens=8), check.reaches)
        found: list[torch.Tensor] = []
        try:
            tables = [self.pool.new_table() for _ in texts]
            self.pool.hold([(tables[0], 1, 1), (tables[1], 1, 1)])
            self.pool.hold([(tables[0], 2, 2)])  # not next to its first block: gathered
            for step in range(3):
                spans = [
                    (i, cuts[i][step], cuts[i][step + 1])
                    for i in range(2)
                    if cuts[i][step] < cuts[i][step + 1]
                ]
                plan = self.planner.plan([Piece(tables[i], begin, end - begin) for i, begin, end in spans])
                ids = torch.zeros(plan.total, dtype=torch.int64, device=self.device)
                for (i, begin, end), row in zip(spans, plan.first_row, strict=True):
                    ids[row : row + end - begin] = texts[i][begin:end]
                if step < 2:
                    logits = self.forward(ids, plan, None).float()
                else:  # backwards: a model that returns all rows, whichever are wanted, differs
                    wanted = torch.arange(plan.total - 1, -1, -1, device=self.device)
                    logits = self.forward(ids, plan, wanted).float().flip(0)
                for (i, begin, end), row in zip(spans, plan.first_row, strict=True):
                    rows = logits[row : row + end - begin]
                    found.append((rows - check.expected[i][begin:end]).abs().amax(-1))
        except (TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            raise ModelError(
                f"the {self.role} model ({self.kind}) cannot run packed ({first_line(error)}): {INSTEAD}"
            ) from error
        return torch.cat(found)

    @property
    def kind(self) -> str:
        """Name of the architecture, as transformers has it."""
        return type(self.model).__name__
