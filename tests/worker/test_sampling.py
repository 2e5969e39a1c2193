"""Sampled tokens: exact samples of the target, truncated as requested, and the same from the speculative
engine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from laps_sd.contract.sampling import LEAST_TEMPERATURE
from tests.worker.drive import finish_all
from tests.worker.margins import margin
from tests.worker.pairs import llama_config, load_pair, write_draft_of, write_model
from tests.worker.plain import choose
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.sampling import choose_tokens, rows_for


def standardised(observed: dict[int, int], probabilities: list[float], total: int) -> float:
    """Return chi-square against given probabilities, cells below 5 expected pooled, as a number of standard
    deviations.
    """
    cells = [(observed.get(i, 0), p * total) for i, p in enumerate(probabilities)]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = (sum(o for o, e in cells if e < 5), sum(e for _, e in cells if e < 5))
    if rest[1] >= 1:
        large.append(rest)
    else:
        assert rest[0] <= 10
    statistic = sum((o - e) ** 2 / e for o, e in large)
    freedom = max(1, len(large) - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, min_p=0.05)])
def test_rows_of_equal_settings_choose_what_they_choose_among_others(sampling: Sampling, device: str) -> None:
    vocab, rows = 100, 40
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(device)
    noise = Noise(vocab, device).gumbel([counter.row_key(7, row) for row in range(rows)])
    alike = rows_for([sampling] * rows, vocab, device)
    mixed = rows_for([sampling] * rows + [Sampling(1.0, top_k=3)], vocab, device).select(range(rows))
    assert alike.noisy.shape[0] == 1 < mixed.noisy.shape[0]
    expected = choose_tokens(logits, mixed, noise)
    assert torch.equal(choose_tokens(logits, alike, noise), expected)
    some = [5, 0, 30]
    assert torch.equal(choose_tokens(logits[some], alike.select(some), noise[some]), expected[some])


def test_a_mixed_batch_chooses_what_each_row_chooses_alone(device: str) -> None:
    """300 rows of every kind, against the rule written a second time in double precision; near ties do not
    count."""
    rng = random.Random(1)
    vocab, rows = 200, 300
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(device)
    settings = [
        Sampling(
            temperature=rng.choice((0.0, 0.3, 0.8, 1.0, 1.7)),
            top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 0.01)),
            top_k=rng.choice((0, 0, 1, 5, 50, 200, 1000)),
            seed=rng.randrange(2**64),
        )
        for _ in range(rows)
    ]
    noise = Noise(vocab, device)
    perturbation = noise.gumbel([counter.row_key(s.seed, i) for i, s in enumerate(settings)])
    chosen = choose_tokens(logits, rows_for(settings, vocab, device), perturbation).tolist()
    near = 0
    for i, setting in enumerate(settings):
        m = margin(logits[i], setting, perturbation[i])
        if min(m.gap, m.boundary) < 1e-4:
            near += 1
        else:
            assert chosen[i] == choose(logits[i], setting, i, noise), (i, setting)
    assert near < 10


def test_a_nucleus_that_keeps_everything_has_no_edge_of_scores(device: str) -> None:
    logits = torch.zeros(4, device=device)
    found = margin(logits, Sampling(temperature=1.0, top_p=0.9), torch.zeros(4, device=device))

    assert found.boundary == pytest.approx(0.1, abs=1e-6), "how far the sums are from top_p, and nothing else"


def test_a_nucleus_wider_than_the_candidates(device: str) -> None:
    """A flat distribution over more tokens than the first look covers."""
    vocab = 3000
    logits = torch.zeros(2, vocab, device=device) + torch.linspace(0, 0.1, vocab, device=device)
    settings = [Sampling(1.0, top_p=0.9, seed=1), Sampling(1.0, top_p=0.9, top_k=2000, seed=2)]
    noise = Noise(vocab, device)
    perturbation = noise.gumbel([counter.row_key(s.seed, 0) for s in settings])
    chosen = choose_tokens(logits, rows_for(settings, vocab, device), perturbation).tolist()
    assert chosen == [choose(logits[i], settings[i], 0, noise) for i in range(2)]


def test_greedy_is_the_argmax(device: str) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device)
    assert (
        choose_tokens(logits, rows_for([Sampling()] * 4, 50, device), None).tolist()
        == logits.argmax(-1).tolist()
    )


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=4)],
    ids=["plain", "top-p", "top-k"],
)
def test_choices_have_the_distribution_of_the_softmax(sampling: Sampling) -> None:
    """20,000 seeds over 12 tokens; chi-square within 4 standard deviations."""
    n, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)) * 1.5
    scores = logits / sampling.temperature
    kept = scores.sort(descending=True).indices[: sampling.top_k or vocab]
    p = torch.zeros(vocab).double()
    p[kept] = scores[kept].double().softmax(-1)
    if sampling.top_p < 1:
        order = p.sort(descending=True).indices
        before = p[order].cumsum(-1) - p[order]
        p[order[before >= sampling.top_p]] = 0
    p /= p.sum()
    perturbation = Noise(vocab).gumbel([counter.row_key(seed, 5) for seed in range(n)])
    chosen = choose_tokens(logits.expand(n, -1), rows_for([sampling] * n, vocab, "cpu"), perturbation)
    assert abs(standardised(Counter(chosen.tolist()), p.tolist(), n)) < 4


def test_speculative_output_has_the_distribution_of_the_target(tmp_path: Path, device: str) -> None:
    """Vocabulary of 8, prompts alike, 3,000 seeds, 4 tokens each at draft length 3.

    The exact probability of every text of four tokens comes from the target alone. Compared: the first token,
    the second and third as a pair (64 cells), and the fourth; each chi-square within 4 standard deviations (a
    chance of about 1e-4 in all). The draft is bad enough that most rounds end with a correction.
    """
    vocab, n = 8, 3_000
    target = write_model(tmp_path / "t", llama_config(vocab_size=vocab, hidden_size=32), seed=3, sharpen=4.0)
    draft = write_draft_of(target, tmp_path / "d", noise=0.7, seed=4)
    prompt = (2, 5, 3)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    texts = list(itertools.product(range(vocab), repeat=3))
    with torch.inference_mode():
        logits = (
            model(input_ids=torch.tensor([[*prompt, *text] for text in texts])).logits[:, 2:].double()
        )  # [512, 4, vocab]
    p = logits.softmax(-1)
    index = torch.tensor(texts)
    first_three = torch.stack([p[torch.arange(512), i, index[:, i]] for i in range(3)], 1).prod(1)  # [512]
    fourth = (first_three[:, None] * p[:, 3]).sum(0)

    engine = load_pair(target, draft, device=device, slots=100, max_length=16, max_draft_len=3, draft_len=3)
    specs = [
        Specification(str(seed), prompt, (), Sampling(1.0, seed=seed), 4, ignore_eos=True)
        for seed in range(n)
    ]
    output, _, reports = finish_all(engine, specs)
    drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("drafted", "accepted"))
    assert 0.1 * drafted < accepted < 0.8 * drafted

    three = first_three.view(vocab, vocab, vocab)
    first = Counter(tokens[0] for tokens in output.values())
    pairs = Counter(tokens[1] * vocab + tokens[2] for tokens in output.values())
    last = Counter(tokens[3] for tokens in output.values())
    assert abs(standardised(first, three.sum((1, 2)).tolist(), n)) < 4
    assert abs(standardised(pairs, three.sum(0).flatten().tolist(), n)) < 4
    assert abs(standardised(last, fourth.tolist(), n)) < 4


@pytest.mark.parametrize("truncated", [False, True])
def test_the_least_temperature_is_as_good_as_greedy(truncated: bool, device: str) -> None:
    logits = torch.tensor([[100.0, 99.9, -100.0, 0.0], [-3.0, -2.9, -500.0, -2.95]], device=device)
    noise = Noise(4, device).gumbel([counter.row_key(7, row) for row in range(2)])
    sampling = Sampling(LEAST_TEMPERATURE, top_k=3 if truncated else 0)
    assert choose_tokens(logits, rows_for([sampling] * 2, 4, device), noise).tolist() == [0, 1]
