"""llama.cpp by llama-cpp-python, at the level of its batches."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from bench._peer_engines.engine import Progress, Refused

BATCH_TOKENS = 2048
"""Tokens of one call, at most."""
QUANTIZED = {"int8": "LLAMA_FTYPE_MOSTLY_Q8_0", "int4": "LLAMA_FTYPE_MOSTLY_Q4_0"}


class LlamaCpp:
    """Every step computes all tokens that are there: whole prompts of new requests, one token of the others."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self._api: Any = llama_cpp
        self._numpy: Any = numpy
        self.version = str(llama_cpp.__version__)
        _be_silent(llama_cpp)
        llama_cpp.llama_backend_init()
        given = llama_cpp.llama_model_default_params()
        given.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(setup["converted_target"]).encode(), given)
        if not self._model:
            raise Refused("llama.cpp cannot load the converted model")
        room = llama_cpp.llama_context_default_params()
        room.n_ctx = setup["slots"] * setup["max_length"]
        room.n_seq_max = setup["slots"]
        # Otherwise the sequences are computed one by one: 27 in place of 164 tokens/s of 16 requests.
        room.kv_unified = True
        room.n_batch = BATCH_TOKENS
        room.n_threads = room.n_threads_batch = setup["threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, room)
        if not self._context:
            raise Refused("llama.cpp has no room for the keys and values")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._free = list(range(setup["slots"]))
        # By number: slot, tokens that are not computed, tokens that are, tokens to come.
        self._running: dict[int, tuple[int, list[int], int, int]] = {}

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        self._running[number] = (self._free.pop(), ids, 0, tokens)

    def step(self) -> list[Progress]:
        batch, last = self._batch, {}
        batch.n_tokens = 0
        for number, (slot, ids, done, _) in self._running.items():
            for at, token in enumerate(ids):
                row = batch.n_tokens
                batch.token[row] = token
                batch.pos[row] = done + at
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = slot
                batch.logits[row] = at == len(ids) - 1
                batch.n_tokens += 1
            last[number] = batch.n_tokens - 1
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._advance(number, row) for number, row in last.items()]

    def _advance(self, number: int, row: int) -> Progress:
        """Choose the most probable token of a request; let go of the request if that was its last."""
        logits = self._api.llama_get_logits_ith(self._context, row)
        token = int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
        slot, ids, done, left = self._running[number]
        if left == 1:
            del self._running[number]
            self._free.append(slot)
            # Keys that are not used any more would be read with the others.
            self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        else:
            self._running[number] = (slot, [token], done + len(ids), left - 1)
        return Progress(number, [token], left == 1)


def convert(source: str, file: Path, weights: str) -> None:
    """Write a directory of the Llama family, with tied embeddings, as a GGUF file without a tokenizer.

    `weights`: int8 (q8_0), int4 (q4_0), bfloat16 or float32. Raise Refused if llama.cpp fails.
    """
    import llama_cpp

    if weights not in QUANTIZED:
        _write(source, file, weights)
        return
    whole = file.with_suffix(".whole.gguf")
    _write(source, whole, "bfloat16")
    _be_silent(llama_cpp)
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = getattr(llama_cpp, QUANTIZED[weights])
    code = llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), ctypes.byref(chosen))
    whole.unlink()
    if code:
        raise Refused(f"llama.cpp cannot quantize the model: code {code}")


def _write(source: str, file: Path, dtype: str) -> None:
    import gguf

    config = json.loads((Path(source) / "config.json").read_text())
    tensors = _tensors(source)
    writer = gguf.GGUFWriter(file, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType
    for name, data in tensors:
        kind = kinds.F32 if data.ndim == 1 or dtype == "float32" else kinds.BF16
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = _interleaved(data, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(data, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(source: str) -> list[tuple[str, Any]]:
    """Return names and float32 arrays of the safetensors files of a directory in bfloat16 or float32."""
    import numpy

    found = []
    for path in sorted(Path(source).glob("*.safetensors")):
        whole = path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        for name, entry in json.loads(whole[8:begin]).items():
            if name == "__metadata__":
                continue
            start, end = (begin + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                words = numpy.frombuffer(whole[start:end], numpy.uint16).astype(numpy.uint32) << 16
                data = words.view(numpy.float32)
            else:
                data = numpy.frombuffer(whole[start:end], numpy.float32)
            found.append((name, data.reshape(entry["shape"])))
    return found


def _interleaved(data: Any, heads: int) -> Any:
    """Return the rows of queries or keys in llama.cpp's order: the two halves of a head alternate."""
    return data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)


_silent: list[Any] = []
"""The callback of the log, which must live as long as the library."""


def _be_silent(api: Any) -> None:
    _silent.append(api.llama_log_callback(lambda *_: None))
    api.llama_log_set(_silent[-1], None)
