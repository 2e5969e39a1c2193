"""Loads one Hugging Face decoder and runs it on packed, ragged rows over our KV pool.

Any decoder of transformers that uses its attention interface will do: we register an attention function that
reads and writes the pool, and all its inputs are keyword arguments of the forward. Models that cannot work
are refused with one sentence: recurrent layers (no rollback), windows shorter than the context, soft-capped
scores, sinks. Because some architectures take the interface and ignore it, every model is compared with its
own plain forward before it serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from worker_svc.engine.cache.kv import KV_TILE, KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.attention import (
    MIN_ROWS,
    KernelPlanner,
    Piece,
    Plan,
    Planner,
    attend,
    exact_spans,
)
from worker_svc.engine.models.fused_llama import LeanModel
from worker_svc.engine.models.linears import LinearStore

ATTENTION = "laps_sd_pool"
PROBE = "laps_sd_probe"
REFUSED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases inside attention",
}
# tokens of the longest sequence of the check at loading, whatever the context length of the settings
CHECKED = 11
SAME_TOKENS = 0.95  # fraction of the smaller vocabulary that compatible tokenizers share (our choice)
HASHED_WHOLE_BYTES = 256 * 2**20  # larger weight files enter the fingerprint by samples
SAMPLES, SAMPLE_BYTES = 64, 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model that the KV pool and the planner need."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int


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
    return attend(q, k, v, laps_sd_pool, layer, laps_sd_plan, scale)[None], None


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    laps_sd_seen: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Record the attention options of each layer, without computing attention."""
    if laps_sd_seen is not None:
        layer: int = getattr(module, "layer_idx", -1)
        laps_sd_seen[layer] = {**options, "query": tuple(query.shape), "key": tuple(key.shape)}
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _pool_attention)
AttentionInterface.register(PROBE, _probe_attention)


class PackedModel:
    """A decoder whose forward takes packed rows of many sequences. Give it a pool with `attach` before `forward`."""

    def __init__(self, model: Any, *, role: str, max_length: int, deterministic: bool) -> None:
        self.model = model.eval()
        self.role = role
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.pool: KVPool
        self.planner: Planner | KernelPlanner
        self.shape = self._probe(max_length)
        self.deterministic = deterministic
        self._min_rows = MIN_ROWS if deterministic else 1  # that a forward computes
        # True if attention is computed by `kernels`: any pieces together cost as much as one by one.
        self.by_kernels = kernels.serve(self.device, self.dtype, self.shape.head_size)
        self.all_by_kernels = False  # the same for all between the embedding and the last product
        self.independent = True  # False: a product's rows were found to depend on each other
        self._max_length = max_length
        self._lean: LeanModel | None = None
        self._spans: tuple[int, ...] | None = (KV_TILE,) if deterministic else None
        model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def optimise(self, *, lean: bool) -> None:
        """Re-lay the weights for this device, and take the short forward where there is one. Before `attach`."""
        store = LinearStore(deterministic=self.deterministic)
        if lean and LeanModel.serves(self.model):
            shape = self.shape
            self._lean = LeanModel(
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
        self.all_by_kernels = self._lean is not None and self._lean.by_kernels
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

    def attach(self, pool: KVPool) -> None:
        """Use this pool from now on."""
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
        )

    def forward(self, ids: torch.Tensor, plan: Plan, logit_rows: torch.Tensor | None) -> torch.Tensor:
        """Return logits [rows, vocab] of the packed rows `logit_rows` (None: all); keys and values of all
        rows go to the pool.

        `ids` [total] int64 in packed order.
        """
        wanted = logit_rows
        if wanted is not None and wanted.numel() < self._min_rows:
            # The output layer is a product like any other.
            wanted = wanted.repeat(self._min_rows)[: self._min_rows]
        if self._lean is not None:
            logits = self._lean.forward(ids, plan, self.pool, wanted)
        else:
            logits = self._full_forward(ids, plan, wanted)
        return logits if logit_rows is None else logits[: logit_rows.numel()]

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
        assert self._lean is not None and self._lean.decoder is not None and plan.pieces is not None
        return self._lean.decoder.propose(
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
    def self_check(self, *, lean: bool) -> None:
        """Take the model's plain forward, then `optimise`, and compare packed forwards with it. Raises ModelError if they differ.

        Two sequences: prefilled in ragged chunks side by side, then one more token each.
        """
        generator = torch.Generator().manual_seed(0)
        lengths, cuts = (CHECKED, 7), ((0, 5, 10, CHECKED), (0, 6, 6, 7))
        texts = [
            torch.randint(self.shape.vocab_size, (n,), generator=generator).to(self.device) for n in lengths
        ]
        self.model.set_attn_implementation("sdpa")
        try:
            expected = [self.model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        self.optimise(lean=lean)
        self.attach(self.new_pool(blocks=4, block_size=8, region_tokens=8))
        try:
            places = [self.pool.new_table() for _ in texts]
            self.pool.hold([(places[0], 1, 1), (places[1], 1, 1)])
            self.pool.hold([(places[0], 2, 2)])  # not next to its first block: gathered
            worst, scale = 0.0, max(float(logits.abs().max()) for logits in expected)
            for step in range(3):
                spans = [
                    (i, cuts[i][step], cuts[i][step + 1])
                    for i in range(2)
                    if cuts[i][step] < cuts[i][step + 1]
                ]
                plan = self.planner.plan([Piece(places[i], begin, end - begin) for i, begin, end in spans])
                ids = torch.zeros(plan.total, dtype=torch.int64, device=self.device)
                for (i, begin, end), row in zip(spans, plan.first_row, strict=True):
                    ids[row : row + end - begin] = texts[i][begin:end]
                logits = self.forward(ids, plan, None).float()
                for (i, begin, end), row in zip(spans, plan.first_row, strict=True):
                    worst = max(
                        worst, float((logits[row : row + end - begin] - expected[i][begin:end]).abs().max())
                    )
        except (TypeError, RuntimeError, KeyError, IndexError) as error:
            raise ModelError(
                f"the {self.role} model ({self._kind()}) cannot run packed: {_first_line(error)}"
            ) from error
        tolerance = (1e-4 if self.dtype == torch.float32 else 0.06) * max(1.0, scale)
        if not worst <= tolerance:
            raise ModelError(
                f"the {self.role} model ({self._kind()}) computes something else when packed than by itself "
                f"(logits differ by {worst:.2g}): this architecture is not supported"
            )

    def _kind(self) -> str:
        return type(self.model).__name__

    @torch.inference_mode()
    def _probe(self, max_length: int) -> Shape:
        """Return the model's shape from a forward that records its attention options; refuse unsupported
        ones.
        """
        kind, config = self._kind(), self.model.config
        if not getattr(self.model, "_supports_attention_backend", False):
            raise ModelError(
                f"the {self.role} model ({kind}) does not use the attention interface of transformers: not supported"
            )
        if getattr(self.model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"the {self.role} model ({kind}) is not a plain decoder (recurrent state or an encoder): not supported"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and limit < max_length:
            raise ModelError(f"the {self.role} model has {limit} positions, but max_length is {max_length}")
        seen: dict[int, dict[str, Any]] = {}
        before = config._attn_implementation
        self.model.set_attn_implementation(PROBE)
        try:
            ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
            vocab = self.model(input_ids=ids, use_cache=False, laps_sd_seen=seen).logits.shape[-1]
        except (TypeError, RuntimeError, KeyError) as error:
            raise ModelError(
                f"the {self.role} model ({kind}) cannot take our attention: {_first_line(error)}"
            ) from error
        finally:
            self.model.set_attn_implementation(before or "sdpa")
        layers = config.num_hidden_layers
        if sorted(seen) != list(range(layers)):
            raise ModelError(
                f"the {self.role} model ({kind}) has layers that are not attention over all tokens: not supported"
            )
        for options in seen.values():
            for name, words in REFUSED.items():
                if options.get(name) is not None:
                    raise ModelError(f"the {self.role} model ({kind}) uses {words}: not supported")
            window = options.get("sliding_window")
            if window is not None and window < max_length:
                raise ModelError(
                    f"the {self.role} model ({kind}) has a sliding window of {window} tokens, shorter than max_length {max_length}"
                )
        if len({(options["query"], options["key"]) for options in seen.values()}) != 1:
            raise ModelError(f"the {self.role} model ({kind}) has layers with different heads: not supported")
        _, heads, _, size = seen[0]["query"]
        return Shape(layers=layers, heads=heads, kv_heads=seen[0]["key"][1], head_size=size, vocab_size=vocab)


def load_packed(
    directory: Path,
    *,
    role: str,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    deterministic: bool,
    lean: bool,
    trust_remote_code: bool = False,
) -> PackedModel:
    """Load one model, lay out its weights, and compare it with its plain forward. Raises ModelError in one sentence."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"there is no {role} model in {directory}: config.json is missing")
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # the causes of its warnings are raised below
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (
        Exception
    ) as error:  # transformers, safetensors and json raise a dozen kinds; each means "cannot be loaded"
        raise ModelError(f"the {role} model in {directory} cannot be loaded: {_first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    wrong = [*info.get("missing_keys", ()), *(key[0] for key in info.get("mismatched_keys", ()))]
    if wrong:
        raise ModelError(
            f"the {role} model in {directory} lacks weights or has them in another shape: {sorted(wrong)[0]}"
        )
    packed = PackedModel(model.to(device), role=role, max_length=max_length, deterministic=deterministic)
    packed.self_check(lean=lean)
    return packed


def end_of_sequence_ids(model: Any) -> frozenset[int]:
    """Return the ids that end a generation, by the generation config if it names any, else by the model's
    config.
    """
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()


class Tokenizer:
    """A tokenizer's vocabulary and decoder; the fast library is enough for both and loads at once."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer in {directory} cannot be read: {_first_line(error)}") from error

    def vocabulary(self) -> dict[str, int]:
        """Return every token and its id, added ones included."""
        return dict(self._fast.get_vocab(with_added_tokens=True))

    def decode(self, ids: Any) -> str:
        """Return the text of the ids, special tokens left out."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the tokenizer in a model's directory; None if there is none."""
    return Tokenizer(directory) if (directory / "tokenizer.json").is_file() else None


def check_pair(
    target: PackedModel,
    draft: PackedModel,
    target_tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
) -> None:
    """Raise ModelError unless a token id means the same to both models, few excepted; either may have ids that the other lacks."""
    if target_tokenizer is not None and draft_tokenizer is not None:
        ours = {token_id: token for token, token_id in target_tokenizer.vocabulary().items()}
        theirs = {token_id: token for token, token_id in draft_tokenizer.vocabulary().items()}
        common = sum(theirs.get(token_id) == token for token_id, token in ours.items())
        # The target decides in any case; a few special tokens with another name only cost draft tokens.
        if common < SAME_TOKENS * min(len(ours), len(theirs)):
            raise ModelError(
                f"target and draft have different tokenizers: of {len(ours)} and {len(theirs)} token ids {common} mean the same to "
                "both; leave the draft out, and the worker looks proposals up in the context"
            )
    elif target.shape.vocab_size != draft.shape.vocab_size:
        raise ModelError(
            f"target and draft have vocabularies of {target.shape.vocab_size} and {draft.shape.vocab_size} tokens: "
            "a token id must mean the same to both"
        )


def fingerprint(directory: Path) -> str:
    """Return a hash of all that decides a model's logits and the meaning of its ids: configuration, tokenizer
    and weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((directory / "config.json").read_text())
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    files = sorted(
        p for p in directory.iterdir() if p.suffix in {".safetensors", ".bin"} or p.name == "tokenizer.json"
    )
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= HASHED_WHOLE_BYTES:
                while chunk := file.read(SAMPLE_BYTES):
                    digest.update(chunk)
            else:
                for sample in range(SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
