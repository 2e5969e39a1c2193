"""What a model takes in memory while it loads, and that the ways to save it change nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.worker.drive import finish_all
from tests.worker.pairs import bfloat16_by_kernels, llama_config, load_pair, write_model
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.models import fused_llama

ROOT = Path(__file__).parents[2]
MEASURED = """
import sys
from pathlib import Path
import torch
from worker_svc.engine.load import load_engine
from worker_svc.engine.options import LoadOptions

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

tiny, large, dtype = sys.argv[1:]
torch.set_num_threads(1)
options = LoadOptions(dtype=dtype, drafter="none", draft_len=0, slots=1, max_length=64)
held = load_engine(tiny, None, options)  # so that modules are imported, and libraries have what they need
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = status("VmRSS")
engine = load_engine(large, None, options)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not kernels.USABLE, reason="torch's layouts are copies")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_is_in_memory_once_while_it_loads(dtype: str, tied: bool, tmp_path: Path) -> None:
    """Pages of files count like all other memory."""
    if dtype == "bfloat16" and not bfloat16_by_kernels():
        pytest.skip("torch's layouts are copies")
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    large = llama_config(vocab_size=32000, tie_word_embeddings=tied, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16)
    parameters = model.num_parameters()
    model.to_empty(device="cpu").tie_weights()
    for weight in model.parameters():
        weight.data.zero_()  # random numbers would take longer than the test
    model.save_pretrained(tmp_path / "large")
    del model
    write_model(tmp_path / "tiny", llama_config(), seed=0)

    command = [sys.executable, "-c", MEASURED, str(tmp_path / "tiny"), str(tmp_path / "large"), dtype]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    weights = parameters * getattr(torch, dtype).itemsize
    assert int(done.stdout) <= 1.3 * weights, int(done.stdout) / weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_that_the_output_layer_stands_for_gives_the_same_text(
    by_kernels_and_by_torch: None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path, llama_config(tie_word_embeddings=True), seed=3)
    specs = [
        Specification(f"r{n}", tuple(range(n, n + 9)), (), Sampling(0.8, seed=n), 20, ignore_eos=True)
        for n in range(3)
    ]
    texts = []
    for least in (2**40, 0):
        monkeypatch.setattr(fused_llama, "TIED_FROM_BYTES", least)
        engine = load_pair(directory, directory, dtype=dtype, slots=3, max_length=64, draft_len=2)
        texts.append(finish_all(engine, specs)[0])
    assert texts[0] == texts[1]


@pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or built without a C compiler")
@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [kernels.PANEL, 100 * kernels.PANEL, 100 * kernels.PANEL + 5])
def test_a_layout_in_the_memory_of_the_weight_is_the_same(dtype: torch.dtype, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, 48, generator=generator).to(dtype)
    x, rows = torch.randn(3, 48, generator=generator).to(dtype), torch.arange(0, outputs, 7)
    expected = kernels.Product(weight, None)

    own = weight.clone()
    product = kernels.Product(own, None, in_place=True)

    assert torch.equal(own, weight) is (outputs % kernels.PANEL > 0)
    assert torch.equal(product(x), expected(x))
    assert torch.equal(product.rows(rows), weight[rows])


@pytest.mark.parametrize("stored", ["in one file", "in several", "for torch"])
def test_weights_are_read_in_each_form(stored: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    spec = Specification("r", tuple(range(9)), (), Sampling(), 20)
    engine = load_pair(pair[0], max_length=64, drafter="none")
    (written,) = finish_all(engine, [replace(spec, ignore_eos=True)])[0].values()
    model = transformers.AutoModelForCausalLM.from_pretrained(pair[0])
    model.generation_config.eos_token_id = [written[4]]
    model.save_pretrained(tmp_path, max_shard_size="100KB" if stored == "in several" else "1GB")
    if stored == "for torch":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert len(list(tmp_path.glob("*.safetensors"))) == {"in one file": 1, "for torch": 0}.get(stored, 4)

    (read,) = finish_all(load_pair(tmp_path, max_length=64, drafter="none"), [spec])[0].values()

    assert read == written[: written.index(written[4]) + 1], "it ends by generation_config.json"
