"""Limits of a specification, which is all settings of a request: the gateway refuses what exceeds them, and the engine
checks them again. All are our choice, unless a docstring names another source.
"""

from __future__ import annotations

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
"""Most characters of one stop string."""
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
"""Largest amount of a presence or frequency penalty, as in OpenAI's API."""
MAX_LOGIT_BIAS = 1024
"""Most tokens with a bias."""
MAX_BIAS = 100.0
"""Largest amount of the bias of a token, as in OpenAI's API."""
MAX_TOP_K = 2**31 - 1
MAX_MIN_TOKENS = 2**31 - 1
MAX_STOP_TOKENS = 64
"""Most token ids that end an output."""
MAX_BAD_WORDS = 128
"""Most texts that an output may not contain."""
MAX_BAD_WORDS_IDS = 2 * MAX_BAD_WORDS + 128
"""Most token sequences that an output may not contain. A text makes up to two."""
MAX_BAD_WORD_TOKENS = 64
"""Most tokens of one of these sequences."""
MAX_BAD_WORD_CHARACTERS = 64
MAX_ALLOWED_TOKENS = 1024
"""Most tokens that an output is limited to."""
MAX_SEED = 2**64 - 1
MAX_FORMAT_CHARACTERS = 65536
"""Most characters of a schema, a regular expression or a grammar."""
MAX_LOGPROBS = 64
"""Most alternatives for each token. A gateway's setting may be lower."""
MAX_PROMPT_LOGPROBS = 2**18
"""Most log probabilities of the tokens of a prompt, alternatives included. A gateway's setting may be lower.
A scheduler keeps them for each request, in about 9 bytes each.
"""

TEN_YEARS_S = 10 * 365 * 86_400
"""Longest grace and deadline of a request that a scheduler accepts, and longest time that it keeps one."""

LENIENCE = 4
"""The scheduler accepts this many times the limits below.

It only keeps and passes on these fields, so it bounds them for its own memory: a gateway or a worker of a
later version, which an upgrade may start before the scheduler, may raise a limit.
"""
RECORDED_STOP_STRINGS = LENIENCE * MAX_STOP_STRINGS
RECORDED_LOGIT_BIAS = LENIENCE * MAX_LOGIT_BIAS
RECORDED_STOP_TOKENS = LENIENCE * MAX_STOP_TOKENS
RECORDED_BAD_WORDS = LENIENCE * MAX_BAD_WORDS_IDS
RECORDED_BAD_WORD_TOKENS = LENIENCE * MAX_BAD_WORD_TOKENS
RECORDED_ALLOWED_TOKENS = LENIENCE * MAX_ALLOWED_TOKENS
RECORDED_LOGPROBS = LENIENCE * MAX_LOGPROBS
RECORDED_PROMPT_LOGPROBS = LENIENCE * MAX_PROMPT_LOGPROBS
RECORDED_FORMAT_BYTES = LENIENCE * 2 * MAX_FORMAT_CHARACTERS
"""Twice the longest format in UTF-8, whose characters take at most 4 bytes."""


def prompt_logprobs_in_all(prompt_tokens: int, alternatives: int) -> int:
    """Return the number of log probabilities of the tokens of a prompt, each with its alternatives."""
    return prompt_tokens * (1 + alternatives)
