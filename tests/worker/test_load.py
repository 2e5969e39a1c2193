"""Loading: many architectures work, what cannot work is refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from gateway.model.files import load_model
from laps_sd.contract.ends import End
from laps_sd.service.model_dir import POSITIONS
from tests.worker.drive import finish_all
from tests.worker.pairs import VOCAB, llama_config, load_pair, with_own_code, write_model
from tests.worker.plain import MARGIN, PlainDecoder
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Engine, ModelError, Sampling, Specification
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.options import EngineOptions
from worker_svc.loading import DEMO

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

WORKING = {
    "llama": llama_config(),
    "llama3": llama_config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    "llama, biases": llama_config(attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "phi3": transformers.Phi3Config(**SMALL),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "granite": transformers.GraniteConfig(**SMALL),
    "smollm3": transformers.SmolLM3Config(**SMALL),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=16),
    "qwen2 moe": transformers.Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                             shared_expert_intermediate_size=32),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "starcoder2": transformers.Starcoder2Config(**SMALL, sliding_window=None),
    "gpt neox": transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "afmoe": transformers.AfmoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                      sliding_window=8),
    "jetmoe": transformers.JetMoeConfig(**{k: v for k, v in SMALL.items() if k != "num_attention_heads"}, kv_channels=16,
                                        num_local_experts=4, num_experts_per_tok=2),
    "gemma 3n": transformers.Gemma3nTextConfig(**SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
                                               vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=8,
                                               num_kv_shared_layers=0, activation_sparsity_pattern=[0.5, 0.0]),
    "opt": transformers.OPTConfig(vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
                                  max_position_embeddings=512, word_embed_proj_dim=64, bos_token_id=0, eos_token_id=1, pad_token_id=0),
    "gpt2": transformers.GPT2Config(**GPT),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKING)
def test_architectures_that_work(name: str, tmp_path: Path, device: str) -> None:
    """The self-check passes, and two requests come out as plain decoding has them."""
    directory = write_model(tmp_path, WORKING[name], seed=2, sharpen=2.0)
    engine = load_pair(directory, directory, device=device, slots=2, max_length=128, draft_len=2)
    rng = random.Random(2)
    specs = [
        Specification(
            f"r{n}",
            tuple(rng.randrange(VOCAB) for _ in range(9 + n)),
            (),
            Sampling(temperature, seed=n),
            12,
            ignore_eos=True,
        )
        for n, temperature in enumerate((0.0, 1.0))
    ]
    output, *_ = finish_all(engine, specs)
    decoder = PlainDecoder(str(directory), device)
    for spec in specs:
        text = decoder.decode(spec)
        assert output[spec.request_id] == text.tokens or min(text.margins) < MARGIN


REFUSED = {
    "softcap": (transformers.Gemma2Config(**SMALL, head_dim=16), "soft-capped"),
    "sinks": (transformers.GptOssConfig(**{**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1}, head_dim=16), "sinks"),
    "no interface": (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), "attention interface"),
    "own reading of weights": (transformers.HunYuanMoEV1Config(**SMALL, head_dim=16, num_experts=4, moe_topk=2),
                               r"cannot run packed \('\w+Linear' object has no attribute 'weight'\)"),
    "recurrent": (transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "attention interface"),
    "linear": (transformers.MiniMaxConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "the type linear_attention"),
    "latent": (transformers.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                                             topk_group=1, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16,
                                             qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1), "latent attention"),
    "angles": (transformers.Phi3Config(**SMALL, sliding_window=None, original_max_position_embeddings=64,
                                       rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                                                        "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}),
               "LAPS_SD_CONTEXT_TOKENS to at most 64"),
    "scales": (transformers.Llama4TextConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=96,
                                             attention_chunk_size=512, floor_scale=128), "from 128 tokens on"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_refused(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    directory = write_model(tmp_path, config, seed=0)
    with pytest.raises(ModelError, match=words) as caught:
        load_pair(directory, max_length=128)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("use --engine vllm")


@pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or no C compiler")
def test_a_model_that_reads_quantised_weights_itself_is_refused(tmp_path: Path) -> None:
    # Experts so small that nearly all weights are those of linear layers.
    config = transformers.HunYuanMoEV1Config(
        **{**SMALL, "intermediate_size": 2}, head_dim=16, num_experts=2, moe_topk=1
    )
    directory = write_model(tmp_path, config, seed=0)
    with pytest.raises(ModelError, match="'Quantised' object has no attribute 'dtype'"):
        load_pair(directory, max_length=128, quantization="int8")


@pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or no C compiler")
@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe"])
def test_quantisation_that_leaves_most_of_a_model_out_is_refused(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, WORKING[name], seed=0)
    with pytest.raises(
        ModelError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj and others are no linear"
    ) as caught:
        load_pair(directory, max_length=128, quantization="int4")
    assert str(caught.value).endswith("leave LAPS_SD_QUANTIZATION out, or use --engine vllm")


def write_tokenizer(directory: Path, words: list[str]) -> None:
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(directory / "tokenizer.json")
    )


def test_a_pair_with_different_tokenizers_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = (Path(shutil.copytree(source, tmp_path / source.name)) for source in pair)
    write_tokenizer(target, [f"w{i}" for i in range(VOCAB)])
    write_tokenizer(draft, [f"w{i}" for i in range(VOCAB)])
    load_pair(target, draft, max_length=64)
    write_tokenizer(draft, [f"w{i}" for i in range(VOCAB - 2)] + ["<its own>", "<mark>"])
    load_pair(target, draft, max_length=64)  # two marks of another name cost nothing but proposals
    write_tokenizer(draft, [f"w{VOCAB - 1 - i}" for i in range(VOCAB)])
    with pytest.raises(ModelError, match="different tokenizers"):
        load_pair(target, draft, max_length=64)


def test_a_pair_with_different_vocabularies_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft = write_model(tmp_path, llama_config(vocab_size=VOCAB + 1), seed=0)
    with pytest.raises(ModelError, match=f"{VOCAB} and {VOCAB + 1} tokens"):
        load_pair(pair[0], draft, max_length=64)


def test_one_tokenizer_may_come_with_padded_vocabularies(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Some model families pad their vocabulary to another multiple for each size."""
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    texts = []
    for size in (VOCAB - 8, VOCAB, VOCAB + 8):
        draft = write_model(tmp_path / str(size), llama_config(vocab_size=size), seed=0)
        write_tokenizer(target, [f"w{i}" for i in range(VOCAB - 8)])
        write_tokenizer(draft, [f"w{i}" for i in range(VOCAB - 8)])
        engine = load_pair(target, draft, slots=4, max_length=64, draft_len=3)
        specs = [
            Specification(f"r{n}", (VOCAB - 1, n), (), Sampling(1.5, seed=n), 20, ignore_eos=True)
            for n in range(4)
        ]
        texts.append(finish_all(engine, specs)[0])
    assert texts[0] == texts[1] == texts[2]


def test_a_missing_directory_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"no target model in .*nowhere: config.json is missing"):
        load_pair(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no draft model"):
        load_pair(pair[0], tmp_path / "nowhere", max_length=64)


@pytest.mark.parametrize("damage", ["truncated weights", "missing weights", "bad config", "another shape"])
def test_damaged_models_are_refused(damage: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(pair[0], tmp_path / "damaged"))
    weights, config = directory / "model.safetensors", directory / "config.json"
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "missing weights":
        values = {**json.loads(config.read_text()), "num_hidden_layers": 3}
        config.write_text(json.dumps(values))
    elif damage == "another shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 64}))
    else:
        config.write_text("{")
    with pytest.raises(ModelError, match="target model in") as caught:
        load_pair(directory, max_length=64, draft_len=2)
    assert "\n" not in str(caught.value)


def test_one_file_of_weights_counts_before_an_index_of_an_earlier_save(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(pair[0])
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert not [*tmp_path.glob("model-*.safetensors")]
    load_pair(tmp_path, max_length=64, draft_len=2)


def test_a_config_may_say_that_nothing_is_quantised(pair: tuple[Path, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(pair[0], tmp_path / "own"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    load_pair(directory, max_length=64, draft_len=2)


def test_a_context_longer_than_the_model_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"has 1024 positions.* 2000 tokens: set LAPS_SD_CONTEXT_TOKENS to at most 1024"
    ):
        load_pair(pair[0], max_length=2000)


def test_memory_for_less_than_a_block_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"1000 bytes of KV hold no block of 16 tokens.*LAPS_SD_KV_MEMORY_BYTES"
    ):
        load_pair(pair[0], max_length=64, memory_bytes=1000)


def test_devices_and_types_that_do_not_exist(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="device 'nonsense'"):
        load_pair(pair[0], device="nonsense")
    with pytest.raises(ValueError, match="dtype must be auto, float32"):
        load_pair(pair[0], dtype="int8")
    with pytest.raises(ValueError, match="deterministic needs"):
        load_pair(pair[0], dtype="float16", deterministic=True, max_length=64)
    with pytest.raises(ModelError, match="deterministic needs a CPU: on meta the bits of a product"):
        load_pair(pair[0], device="meta", deterministic=True, max_length=64)


def test_bfloat16_is_not_called_deterministic_where_it_is_not(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "USABLE", False)
    with pytest.raises(ModelError, match="deterministic in bfloat16 needs"):
        load_pair(pair[0], dtype="bfloat16", deterministic=True, max_length=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"slots": 0}, "slots"), ({"prefill_chunk": 0}, "prefill_chunk"), ({"draft_len": 9}, "draft_len")],
)
def test_options_that_make_no_sense(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineOptions(**change)  # type: ignore[arg-type]


def test_bfloat16_runs(pair: tuple[Path, Path], device: str) -> None:
    """Not deterministic, but complete: right lengths, and a text that is the same when nothing changes."""
    texts = []
    for _ in range(2):
        engine = load_pair(*pair, device=device, dtype="bfloat16", slots=4, max_length=64, draft_len=3)
        specs = [
            Specification(f"r{n}", (n, 5, 6), (), Sampling(0.9, seed=n), 20, ignore_eos=True)
            for n in range(4)
        ]
        texts.append(finish_all(engine, specs)[0])
    assert texts[0] == texts[1]
    assert {len(tokens) for tokens in texts[0].values()} == {20}


@pytest.mark.parametrize("options", [{}, {"draft_len": 2}, {"drafter": "none"}], ids=str)
def test_a_pair_has_computed_the_largest_round_before_its_first_request(
    pair: tuple[Path, Path], device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is greeted, and ready, after loading: one-time work of a device is done by then."""
    rows: list[int] = []
    forward = PackedModel.forward

    def counted(self: PackedModel, ids: Any, plan: Any, wanted: Any) -> Any:
        rows.append(0 if wanted is None else len(wanted))
        return forward(self, ids, plan, wanted)

    monkeypatch.setattr(PackedModel, "forward", counted)

    engine = load_pair(*pair, device=device, slots=6, max_length=64, max_draft_len=4, **options)

    assert max(rows) == 6 * (1 + engine.capacity.max_draft_len)


def test_fingerprints_tell_models_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def name(target: Path, draft: Path | None, **options: object) -> str:
        engine = load_pair(target, draft, max_length=64, **{"draft_len": 2, **options})
        assert isinstance(engine, Engine)
        return engine.fingerprint

    copy = Path(shutil.copytree(pair[0], tmp_path / "copy"))
    names = [name(*pair), name(pair[0], None), name(pair[1], pair[0]), name(*pair, dtype="bfloat16")]
    assert len(set(names)) == 4
    assert name(copy, pair[1]) == names[0]
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert name(copy, pair[1]) != names[0]


def test_fingerprints_tell_ends_of_texts_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same weights, of which one directory names another end of a text than config.json."""
    other = Path(shutil.copytree(pair[0], tmp_path / "other"))
    path = other / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 7]}))
    assert load_pair(other, max_length=64).fingerprint != load_pair(pair[0], max_length=64).fingerprint


def test_the_end_of_texts_may_be_named_by_the_tokenizer_alone(tmp_path: Path) -> None:
    """Gateways hide that token, so a worker that goes on after it would send empty text up to the limit."""
    target = Path(shutil.copytree(DEMO / "target", tmp_path / "target"))
    for name in ("config.json", "generation_config.json"):
        path = target / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    model = load_model(target, name="demo")
    (end,) = model.eos_ids
    prompt = tuple(model.encode_text("What is 3 + 4?"))
    spec = Specification("r", (1, *prompt), (), Sampling(0.0, seed=1), 64)

    output, last, _ = finish_all(load_pair(target, max_length=128), [spec])
    assert last["r"].finish is End.STOP
    assert output["r"][-1] == end


def test_ends_of_texts_that_are_no_tokens_are_left_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(pair[0], tmp_path / "other"))
    path = other / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, -1, VOCAB]}))
    assert load_pair(other, max_length=64).fingerprint == load_pair(pair[0], max_length=64).fingerprint


def test_what_must_stay_light_imports_no_torch() -> None:
    code = "import worker_svc.fake.engine, worker_svc.engine.interface, sys; assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_self_check_finds_a_model_that_ignores_its_pool(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silently wrong architecture is simulated: packed rows do not attend to their own past."""
    import worker_svc.engine.models.model as module

    monkeypatch.setattr(module, "attend", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(ModelError, match="computes something else when packed"):
        load_pair(pair[0], max_length=64, fused=False)


def test_factors_of_positions_are_stored_once_for_all_heads(pair: tuple[Path, Path]) -> None:
    engine = load_pair(pair[0], dtype="float16", max_length=512, draft_len=2)
    fused = engine._pair.target._fused
    assert fused is not None and not fused.by_kernels
    assert fused._turns.nbytes <= 512 * 16 * 8  # positions, size of a head


def test_experts_are_not_called_deterministic(tmp_path: Path) -> None:
    """The rows of an expert are one product, whose bits depend on their number, which depends on the batch."""
    directory = write_model(tmp_path, WORKING["mixtral"], seed=0)
    assert (
        load_pair(directory, max_length=64, draft_len=2).facts[1].endswith("the text may depend on the batch")
    )
    with pytest.raises(ModelError, match="deterministic needs a target model without experts"):
        load_pair(directory, max_length=64, draft_len=2, deterministic=True)
    dense = write_model(tmp_path / "dense", llama_config(num_experts=1), seed=0)
    load_pair(dense, max_length=64, draft_len=2, deterministic=True)


@pytest.mark.parametrize("seed", range(3))
def test_experts_in_half_precision_are_not_refused_for_their_roundings(
    seed: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router between two equally good experts takes either, and the logits of that row are others."""
    import worker_svc.engine.models.model as module

    sizes = {**SMALL, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    config = transformers.MixtralConfig(
        **sizes, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    )
    directory = write_model(tmp_path, config, seed=seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 3:  # those of all experts of a layer, as loud as the others
                weight.mul_(3.0)
    model.save_pretrained(directory)
    load_pair(directory, device=device, dtype="bfloat16", max_length=64, draft_len=2)
    monkeypatch.setattr(module, "attend", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(ModelError, match="computes something else when packed"):
        load_pair(directory, device=device, dtype="bfloat16", max_length=64, draft_len=2)


def test_code_that_comes_with_a_model_does_not_run_unless_it_is_trusted(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = with_own_code(pair[0], tmp_path / "own", first=f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_pair(directory, max_length=64, draft_len=2)
    assert not (tmp_path / "ran").exists()
    load_pair(directory, max_length=64, draft_len=2, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_code_that_may_run_enters_the_fingerprint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(pair[0], tmp_path / "own"))
    names = []
    for trusted in (False, True):
        for code in ("first = 1", "second = 2"):
            (directory / "own.py").write_text(code)
            names.append(load_pair(directory, max_length=64, trust_remote_code=trusted).fingerprint)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_the_self_check_finds_a_model_that_returns_other_logits_than_are_wanted(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = with_own_code(
        pair[0],
        tmp_path / "own",
        methods="    def forward(self, *args, logits_to_keep=0, **kwargs):\n"
        "        return super().forward(*args, **kwargs)\n",
    )
    with pytest.raises(ModelError, match="computes something else when packed"):
        load_pair(directory, max_length=64, draft_len=2, trust_remote_code=True)


def test_a_gateway_knows_every_name_that_transformers_gives_the_context_limit() -> None:
    """Gateways do not import transformers: its attribute maps are compared with the list that they have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    maps = (getattr(CONFIG_MAPPING[kind], "attribute_map", None) or {} for kind in CONFIG_MAPPING)
    names = {each["max_position_embeddings"] for each in maps if "max_position_embeddings" in each}
    assert "n_positions" in names
    assert names <= set(POSITIONS)
