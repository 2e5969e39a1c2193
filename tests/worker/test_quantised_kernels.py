"""Products with quantised weights: they are those of the dequantised weights, and a row comes out the same bit for bit
whatever is computed along with it."""

from __future__ import annotations

import pytest
import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.cpu.quantised import PANEL, Quantised, group_of, quantise, stacked

pytestmark = pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or no C compiler")

OUTPUTS = 7 * PANEL - 5  # not of whole panels, and neither two nor four panels at a time
GROUPS = 3
ROWS = (*range(1, 18), 29, 31, 63, 64, 65, 128, 129)  # each way of dividing them


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(bits: int, group: int, *, offsets: bool) -> Quantised:
    weight = quantise(random(OUTPUTS, GROUPS * group), bits, group)
    if not offsets:
        return weight
    chosen = torch.randint(-8, 9, weight.scales.shape, generator=torch.Generator().manual_seed(1))
    return Quantised(bits, weight.numbers, weight.scales, chosen.half())


@pytest.mark.usefixtures("each_width")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("group", [32, 96, 128, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_is_that_of_the_dequantised_weight_and_its_rows_are_independent(
    bits: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    weight = weight_of(bits, group, offsets=offsets)
    x = random(ROWS[-1], weight.shape[1], seed=3).to(dtype)
    for bias in (None, random(OUTPUTS, seed=2)):
        product = kernels.Product(weight, bias, dtype)
        out = product(x)
        expected = x.double() @ weight.dequantised().double().T + (0 if bias is None else bias.double())
        assert (out - expected).abs().max() < 2e-6 * expected.abs().max()
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), out[:rows])
            assert torch.equal(product(x[-rows:].clone()), out[-rows:])


@pytest.mark.usefixtures("each_width")
@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_has_its_place_and_value(bits: int) -> None:
    """A unit vector picks one input: each output is the number itself, and all numbers occur."""
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    numbers = torch.arange(64 * 64).remainder(most - least + 1).add(least).to(torch.int8).view(64, 64)
    weight = Quantised(bits, numbers, torch.ones(64, 1, dtype=torch.float16))
    out = kernels.Product(weight, None)(torch.eye(64, dtype=torch.bfloat16))
    assert torch.equal(out, numbers.T.float())


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
def test_quantising_keeps_a_weight_to_the_precision_of_its_bits(bits: int, error: float) -> None:
    weight = random(64, 256)
    weight[3] = 0
    near = quantise(weight, bits, 128).dequantised()
    assert (near - weight).norm() < error * weight.norm()
    assert torch.equal(near[3], weight[3])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_stay_what_they_are_when_they_are_quantised_again(bits: int) -> None:
    once = quantise(random(64, 256), bits, 32)
    if bits == 4:  # in the format that llama.cpp calls q4_0
        largest = random(64, 256).unflatten(1, (-1, 32)).abs().amax(-1)
        numbers = torch.randint(-8, 8, (64, 8, 32), generator=torch.Generator().manual_seed(4))
        numbers[..., 0] = -8
        once = Quantised(4, numbers.flatten(1).to(torch.int8), largest.half())
    again = quantise(once.dequantised(), bits, 32)
    assert torch.equal(again.dequantised(), once.dequantised())


def test_rows_of_alike_weights_are_put_together_and_reordered() -> None:
    first, second = (quantise(random(8, 64, seed=seed), 8, 32) for seed in (1, 2))
    both = stacked([first, second]).at(torch.arange(15, -1, -1))
    expected = torch.cat([first.dequantised(), second.dequantised()]).flip(0)
    assert torch.equal(both.dequantised(), expected)
    assert not first.alike(quantise(random(8, 64), 8, 64))


def test_groups_divide_the_inputs() -> None:
    assert [group_of(width, 128) for width in (896, 4864, 704, 96, 40)] == [128, 128, 64, 96, 0]
