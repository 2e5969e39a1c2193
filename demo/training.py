"""One training: of the target on the corpus, or of the draft on the target."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from demo.batches import Batch
from demo.pair import logits_of

MUON_LR: Final = 0.02
ADAMW_LR: Final = 3e-3


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms; one schedule for both."""

    def __init__(self, model: nn.Module, peak: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._peak = peak
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    @staticmethod
    def rate_factor(progress: float) -> float:
        """Warm-up, a plateau, then linear to zero over the last six tenths."""
        return min(1.0, progress / 0.02 + 0.02, max(0.0, (1.0 - progress) / 0.6))

    def step(self, progress: float) -> None:
        """Apply the gradients; progress runs from 0 to 1 over the training."""
        for optimizer, peak in zip(self._optimizers, (MUON_LR, ADAMW_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self._peak * self.rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One training, of the target or of the draft."""

    label: str
    steps: int
    limit_s: float  # where the machine is too slow for `steps`, the schedule reaches its end by this time
    peak: float  # factor on the learning rates
    device: torch.device
    compiled: bool
    checkpoint: Path


def train_model(
    model: LlamaForCausalLM,
    stream: Iterator[Batch],
    settings: TrainSettings,
    *,
    teacher: LlamaForCausalLM | None,
) -> int:
    """Cross-entropy on the corpus or, with a teacher, forward KL divergence to its distribution. Returns the
    steps."""
    device = settings.device
    forward: Callable[..., Any] = model.to(device).train()
    guide: Callable[..., Any] | None = teacher.to(device).eval() if teacher is not None else None
    if settings.compiled:
        forward = torch.compile(forward, dynamic=False)
        guide = torch.compile(guide, dynamic=False) if guide is not None else None
    optimizers = Optimizers(model, settings.peak)
    started_s = time.monotonic()
    running, seen_tokens, step, progress = 0.0, 0, 0, 0.0
    while progress < 1.0:
        batch = next(stream).to(device)
        keep = batch.weights.flatten() > 0
        weights = batch.weights.flatten()[keep]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = logits_of(forward, batch).flatten(0, 1)[keep]
        if guide is None:
            losses = nn.functional.cross_entropy(
                logits.float(), batch.labels.flatten()[keep], reduction="none"
            )
        else:
            with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
                goal = logits_of(guide, batch).flatten(0, 1)[keep].float().log_softmax(-1)
            losses = nn.functional.kl_div(
                logits.float().log_softmax(-1), goal, reduction="none", log_target=True
            ).sum(-1)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(progress)
        step += 1
        seen_tokens += int((batch.kinds >= 0).sum())
        elapsed_s = time.monotonic() - started_s
        progress = max(step / settings.steps, elapsed_s / settings.limit_s)
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 20 == 0 or progress >= 1.0:
            print(
                f"{settings.label} step {step}/{settings.steps} loss {running:.3f} tokens {seen_tokens / 1e6:.2f}M "
                f"{seen_tokens / elapsed_s:.0f} tok/s {elapsed_s:.0f} s",
                flush=True,
            )
        if step % 200 == 0:
            save_file(
                {name: p.detach().contiguous() for name, p in model.named_parameters()}, settings.checkpoint
            )
    return step
