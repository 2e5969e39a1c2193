"""The noise generator: the same integers everywhere, uniform bits, independent of what should not matter."""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise, NoiseOfRows

pytestmark = pytest.mark.usefixtures("by_kernels_and_by_torch")

# Part of the public contract: (seed, position, token id) -> (row key, bits). Never to change under the same
# version.
VECTORS = [
    (0, 0, 0, 0xA706DD2F4D197E6F, 0x2A003055),
    (0, 0, 1, 0xA706DD2F4D197E6F, 0x25538E38),
    (0, 1, 0, 0xB382A305F4414F5E, 0x914C2AE4),
    (1, 0, 0, 0x5E41AB087439611E, 0x8636BE1C),
    (42, 7, 1023, 0xBC16A3D4CC48678E, 0x9FC4AE0F),
    (9223372036854775808, 100, 31999, 0xAE6FDC0ED7037DA1, 0xD2862E3D),
    (18446744073709551615, 65535, 151935, 0x7E686EAC24CDBAE2, 0xF6E117AF),
]


@pytest.mark.parametrize(("seed", "position", "token", "key", "bits"), VECTORS)
def test_vectors_of_the_contract(
    seed: int, position: int, token: int, key: int, bits: int, device: str
) -> None:
    assert counter.row_key(seed, position) == key
    assert counter.token_bits(key, token) == bits
    row = Noise(token + 1, device).bits([key])[0]
    assert int(row[token]) % 2**32 == bits


def test_splitmix64_is_the_published_one() -> None:
    """First outputs of splitmix64 seeded with 1234567, as its author lists them."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(counter.mix64(state))
        state += counter.GOLDEN
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_torch_agrees_with_the_reference(device: str) -> None:
    """Bits agree exactly; Gumbel noise to single precision in the relevant range."""
    seeds, positions, vocab = (0, 1, 2**63, 2**64 - 1), (0, 1, 1000), 257
    noise = Noise(vocab, device)
    for seed in seeds:
        for position in positions:
            key = counter.row_key(seed, position)
            bits = noise.bits([key])[0].cpu().tolist()
            assert [b % 2**32 for b in bits] == [counter.token_bits(key, i) for i in range(vocab)]
            gumbel = noise.gumbel([key])[0].cpu().tolist()
            for ours, exact in zip(
                gumbel, (counter.gumbel(seed, position, i) for i in range(vocab)), strict=True
            ):
                # Below, 1 - v has lost bits in single precision; a token with such noise hardly ever wins.
                assert ours == pytest.approx(exact, rel=2e-6, abs=2e-6 if exact > -1.5 else 0.05)


def test_rows_are_independent_of_their_batch(device: str) -> None:
    noise = Noise(300, device)
    keys = [counter.row_key(seed, 3) for seed in range(5)]
    together = noise.gumbel(keys)
    for row, key in enumerate(keys):
        assert torch.equal(together[row], noise.gumbel([key])[0])


def test_noise_is_always_finite(device: str) -> None:
    """Also at the ends of the range of bits."""
    for bits in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        v = min((bits + 0.5) / 2.0**32, counter.V_MAX)
        assert math.isfinite(-math.log(-math.log1p(-v)))
    assert Noise(4096, device).gumbel([counter.row_key(s, 0) for s in range(256)]).isfinite().all()


def chi_square(counts: torch.Tensor) -> float:
    """Return the standardised chi-square of counts that should be equal: about N(0, 1) for many cells."""
    expected = counts.sum() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.numel() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "view", ["one row", "one token", "neighbours in position", "neighbours in token", "neighbours in seed"]
)
def test_bits_are_uniform(view: str) -> None:
    """2**20 draws (2**18 of one token) in 4096 cells of the upper 12 (or 6 + 6) bits; chi-square within 4.5
    standard deviations (chance 1e-5).
    """
    n = 2**20
    if view == "one row":
        high = Noise(n).bits([counter.row_key(7, 11)])[0] >> 20 & 0xFFF
    elif view == "one token":
        noise = Noise(4)
        high = (
            torch.cat([noise.bits([counter.row_key(s, p) for p in range(512)])[:, 3] for s in range(512)])
            >> 20
            & 0xFFF
        )
    else:
        vocab = 1024
        noise = Noise(vocab)
        by_seed = view == "neighbours in seed"
        rows = noise.bits(
            [counter.row_key(p if by_seed else 5, 5 if by_seed else p) for p in range(n // vocab + 1)]
        )
        a, b = (rows[:, :-1], rows[:, 1:]) if view == "neighbours in token" else (rows[:-1], rows[1:])
        high = ((a >> 26 & 63) * 64 + (b >> 26 & 63)).flatten()
    assert abs(chi_square(torch.bincount(high.flatten().long(), minlength=4096).double())) < 4.5


def test_every_bit_is_balanced() -> None:
    bits = Noise(2**18).bits([counter.row_key(1, 2), counter.row_key(2, 1)]).long()
    ones = torch.stack([(bits >> shift & 1).sum() for shift in range(32)]).double()
    assert ((ones - 2**18).abs() < 4.5 * math.sqrt(2**19) / 2).all()


def test_gumbel_moments() -> None:
    """Mean 0.5772, variance pi**2 / 6; 2**20 draws, 5 standard errors."""
    draws = Noise(2**20).gumbel([counter.row_key(3, 3)])[0].double()
    assert abs(float(draws.mean()) - 0.5772157) < 5 * 1.2825 / 1024
    assert abs(float(draws.var()) - math.pi**2 / 6) < 5 * 3.5 / 1024


def test_noise_of_rows_is_generated_for_the_rows_that_need_it(device: str) -> None:
    vocab, keys = 77, [counter.row_key(3, at) for at in range(6)]
    expected = Noise(vocab, device).gumbel(keys)
    noise = NoiseOfRows(Noise(vocab, device), keys)
    for rows in ([4], [4, 1], [0]):
        assert torch.equal(noise.of(rows)[rows], expected[rows])
    assert torch.equal(noise.of(), expected)
    assert noise.keys == array("Q", keys)
