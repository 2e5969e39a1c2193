"""The requests of a run."""

from __future__ import annotations

import argparse
import random

from bench._clients import Piece
from laps_sd.client import Options
from laps_sd.v1 import inference_pb2 as pb

MORE: tuple[Options, ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.02, "logit_bias": {65: 2.0}},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"stop": [" the"]},
    {"output_format": pb.OutputFormat(regex="([a-z]{1,9} ){40}[a-z]+"), "ignore_eos": False},
    {"output_format": pb.OutputFormat(json_object=True), "ignore_eos": False},
    {"speculation": "off"},
)
"""Options in turn with a real engine: all that the choice of a token depends on besides the model. What a worker
continues from committed tokens must be as if it had generated these."""


def pieces(options: argparse.Namespace) -> list[Piece]:
    """Return the distinct requests, decided by the seed."""
    rng = random.Random(options.seed)
    if options.engine == "fake":
        more: tuple[Options, ...] = ({},)
        prompts = [
            f"Story {number}, told " + "again " * rng.randrange(20) for number in range(options.pieces)
        ]
        shortest, longest = 20, 240
    else:
        from demo.prompts import demo_prompts

        more = MORE
        prompts = [prompt.text for prompt in demo_prompts(None, options.pieces, seed=options.seed)]
        shortest, longest = 32, 160
    return [
        Piece(
            prompt,
            rng.getrandbits(32),
            rng.randint(shortest, longest),
            rng.choice((0.0, 0.8)),
            more[number % len(more)],
        )
        for number, prompt in enumerate(prompts)
    ]
