"""Quality of the pair: held-out loss, right answers, lengths, and how much of the draft the target accepts.

Acceptance is measured with coupled sampling and without an engine. At every position target and draft choose
`argmax(log p + g)` with the same Gumbel noise `g`. A draft token is only tested when all before it were
accepted, that is when the draft saw exactly the target's text; so one pass of the draft over the target's
text shows for each position whether its draft token would have been accepted, and the rounds follow from
that.

    text      t0 t1 t2 t3 t4 t5 t6 ...
    agrees     +  +  -  +  +  +  +        gamma = 4
    rounds    [t0 t1 | t2] [t3 t4 t5 t6 | t7]      accepted 2 and 4; what follows the bar is the target's own token
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from demo.corpus import BOS
from demo.prompts import Prompt

GAMMA: Final = 4
SAMPLE_BATCH: Final = 48


@dataclass(frozen=True, slots=True)
class Sample:
    """Output of the target, and the positions at which the draft would have chosen the same."""

    prompt: Prompt
    prompt_ids: list[int]
    output_ids: list[int]  # with the end token, if it came
    ended: bool
    agrees: list[bool]  # [output tokens]


@dataclass(frozen=True, slots=True)
class Round:
    """Counts of one draft-and-verify round; tested = accepted + the first rejected one, if any."""

    drafted: int
    tested: int
    accepted: int


def gumbel_noise(seed: int, tokens: int, vocabulary: int) -> Tensor:
    """[tokens, vocabulary] float32"""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, vocabulary, generator=generator).clamp_(1e-9, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> list[int]:
    """Token ids of the prompt as it stands, or as the only user message of a chat. A prompt that begins with the
    begin token is a rendered chat."""
    if text.startswith(BOS):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not chat:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _scores(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 0 else logits / temperature + noise


@torch.inference_mode()
def _generate(
    model: LlamaForCausalLM, prompts: list[list[int]], noise: Tensor, temperature: float, eos_id: int
) -> list[list[int]]:
    """Left-padded batch through the cache of transformers; noise is [requests, tokens, vocabulary]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[eos_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    cache = DynamicCache(config=model.config)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(noise.shape[1]):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        ids = _scores(out.logits[:, -1].float(), noise[:, step], temperature).argmax(-1, keepdim=True)
        for row, token in enumerate(ids[:, 0].tolist()):
            if not done[row]:
                outputs[row].append(token)
        done |= ids[:, 0] == eos_id
        if done.all():
            break
        mask = nn.functional.pad(mask, (0, 1), value=1)
        positions = positions[:, -1:] + 1
    return outputs


@torch.inference_mode()
def _agreement(
    draft: LlamaForCausalLM,
    prompts: list[list[int]],
    outputs: list[list[int]],
    noise: Tensor,
    temperature: float,
) -> list[list[bool]]:
    """Return for each output position whether the draft's own choice is the target's."""
    rows = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(map(len, rows))
    logits = draft(
        input_ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]), use_cache=False
    ).logits
    agrees = []
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        span = logits[row, len(prompt) - 1 : len(prompt) - 1 + len(output)].float()
        choice = _scores(span, noise[row, : len(output)], temperature).argmax(-1)
        agrees.append((choice == torch.tensor(output)).tolist())
    return agrees


def sample(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    chat: bool = False,
) -> list[Sample]:
    """Let the target write under shared noise; temperature 0 is greedy for both models."""
    samples: list[Sample] = []
    eos_id = int(tokenizer.eos_token_id)
    for start in range(0, len(prompts), SAMPLE_BATCH):
        chunk = prompts[start : start + SAMPLE_BATCH]
        ids = [encode_prompt(tokenizer, prompt.text, chat=chat) for prompt in chunk]
        vocabulary = target.config.vocab_size
        noise = torch.stack(
            [
                gumbel_noise(seed * 1_000_003 + start + i, max_new_tokens, vocabulary)
                for i in range(len(chunk))
            ]
        )
        outputs = _generate(target, ids, noise, temperature, eos_id)
        agreement = _agreement(draft, ids, outputs, noise, temperature)
        for prompt, prompt_ids, output, agrees in zip(chunk, ids, outputs, agreement, strict=True):
            samples.append(Sample(prompt, prompt_ids, output, output[-1] == eos_id, agrees))
    return samples


def rounds_of(agrees: Sequence[bool]) -> list[Round]:
    """A request's rounds. The last one drafts no further than the output's end."""
    rounds, at = [], 0
    while at < len(agrees):
        window = agrees[at : at + GAMMA]
        accepted = next((i for i, agree in enumerate(window) if not agree), len(window))
        rounds.append(Round(len(window), min(accepted + 1, len(window)), accepted))
        at += accepted + 1
    return rounds


def intraclass_correlation(groups: Sequence[Sequence[float]]) -> float:
    """Between-group share of the variance (one-way random effects, unequal group sizes)."""
    groups = [group for group in groups if group]
    total = sum(map(len, groups))
    if len(groups) < 2 or total <= len(groups):
        return float("nan")
    grand = sum(map(sum, groups)) / total
    means = [statistics.fmean(group) for group in groups]
    between = sum(len(g) * (m - grand) ** 2 for g, m in zip(groups, means, strict=True)) / (len(groups) - 1)
    within = sum((x - m) ** 2 for g, m in zip(groups, means, strict=True) for x in g) / (total - len(groups))
    n0 = (total - sum(len(g) ** 2 for g in groups) / total) / (len(groups) - 1)
    component = max(0.0, (between - within) / n0)
    return component / (component + within) if component + within > 0 else float("nan")


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def summarise(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """One table row: acceptance over all rounds, ICC over full ones, lengths in tokens, share of right
    answers."""
    rounds = [round_ for s in samples for round_ in rounds_of(s.agrees)]
    checked = [s for s in samples if s.prompt.answer is not None]
    right = [text_of(tokenizer, s.output_ids).strip() == (s.prompt.answer or "").strip() for s in checked]
    lengths = [len(s.output_ids) for s in samples]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    by_request = [[float(r.accepted) for r in rounds_of(s.agrees) if r.drafted == GAMMA] for s in samples]
    return {
        "requests": len(samples),
        "rounds": len(rounds),
        "accepted_of_drafted": accepted / drafted,
        "accepted_of_tested": accepted / sum(r.tested for r in rounds),
        "tokens_per_round": sum(lengths) / len(rounds),
        "icc": intraclass_correlation(by_request),
        "ended": sum(s.ended for s in samples) / len(samples),
        "length_p10": quantile(lengths, 0.1),
        "length_p50": quantile(lengths, 0.5),
        "length_p90": quantile(lengths, 0.9),
        "right": sum(right) / len(right) if right else None,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, one row per kind."""
    columns = list(next(iter(rows.values())))
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for kind, row in rows.items():
        cells = ["" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
