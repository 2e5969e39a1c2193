"""The requests of a run."""

from __future__ import annotations

import argparse
import random

from bench._clients import Piece


def pieces(options: argparse.Namespace) -> list[Piece]:
    """Return the distinct requests, decided by the seed."""
    rng = random.Random(options.seed)
    if options.engine == "demo":
        from demo.prompts import demo_prompts

        prompts = [prompt.text for prompt in demo_prompts(None, options.pieces, seed=options.seed)]
        shortest, longest = 32, 160
    else:
        prompts = [
            f"Story {number}, told " + "again " * rng.randrange(20) for number in range(options.pieces)
        ]
        shortest, longest = 20, 240
    return [
        Piece(prompt, rng.getrandbits(32), rng.randint(shortest, longest), rng.choice((0.0, 0.8)))
        for prompt in prompts
    ]
