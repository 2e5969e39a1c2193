"""The text that a model with quantised weights should generate: plain decoding with the dequantised weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torch import nn

from tests.worker.drive import finish_all
from tests.worker.pairs import VOCAB, load_pair
from tests.worker.plain import PlainDecoder
from tests.worker.test_identity import assert_same
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.quantisation.linear import QuantisedLinear


def specifications() -> list[Specification]:
    rng = random.Random(3)
    kinds = (Sampling(), Sampling(0.8, seed=1), Sampling(0.8, top_p=0.9, seed=2))
    return [
        Specification(
            f"r{n}",
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 17, 40)))),
            (),
            kinds[n % len(kinds)],
            24,
            ignore_eos=True,
        )
        for n in range(9)
    ]


def assert_text_of(dequantised: Path, packed: Path, draft: Path | None = None, **options: Any) -> None:
    """The engine of `packed` generates what plain decoding does with the model in `dequantised`."""
    decoder = PlainDecoder(str(dequantised), "cpu")
    plain = {spec.request_id: decoder.decode(spec) for spec in specifications()}
    engine = load_pair(packed, draft, slots=4, max_length=128, max_draft_len=4, prefill_chunk=16, **options)
    output, *_ = finish_all(engine, specifications())
    assert_same(output, plain)


def dequantise(model: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear):
                out, width = child.weight.shape
                layer = nn.Linear(width, out, bias=child.bias is not None)
                layer.weight.data, layer.bias = child.weight.dequantised(), child.bias
                setattr(parent, name, layer)
