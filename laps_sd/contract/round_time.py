"""The time that a round may take when it computes context: one rule, the same in workers and in simulations.

Requests that decode get their next tokens when the round ends, so that context which rides along delays all of
them. Why these numbers: docs/decisions/0047.
"""

from __future__ import annotations

from typing import Final

PLAIN_ROUNDS: Final = 3.0
"""A round with context takes at most this many times as long as the same round without."""
ALONE_ROUNDS: Final = 10.0
"""The same where no request decodes, and only arrivals wait: then context is computed in larger parts, in which
the fixed cost of a round, paid once per part, is a tenth."""


def prefill_time_s(max_round_s: float, plain_s: float, decoding: int) -> float:
    """Return the seconds that a round may spend on context; its decoding part takes `plain_s` seconds.

    `decoding`: requests in that part. With none it is the fixed cost of a round. The round takes at most
    `max_round_s`, or a multiple of the decoding part, whichever is longer.
    """
    return max(max_round_s, (PLAIN_ROUNDS if decoding else ALONE_ROUNDS) * plain_s) - plain_s
