"""Same seed, same text."""

from __future__ import annotations

from laps_sd.client import Client
from laps_sd.local import LocalStack


def test_the_same_seed_gives_the_same_text(demo_stack: LocalStack) -> None:
    """The token at a position depends on the seed, the position and the target model, and on nothing else.

    This test runs the shipped models, because here they are the point.
    """
    with Client(demo_stack.gateway_address) as client:
        first = client.generate("Once upon a time", seed=7, max_tokens=24)
        again = client.generate("Once upon a time", seed=7, max_tokens=24)
        other = client.generate("Once upon a time", seed=8, max_tokens=24)

    assert first.text == again.text
    assert first.text != other.text


def test_speculation_changes_the_speed_and_not_the_text(demo_stack: LocalStack) -> None:
    """With or without the draft model, and however long its proposals are."""
    with Client(demo_stack.gateway_address) as client:
        texts = {
            client.generate("Once upon a time", seed=7, max_tokens=24, speculation=speculation).text
            for speculation in ("auto", "off", 2)
        }

    assert len(texts) == 1


def test_a_request_without_a_seed_is_told_the_one_it_got(demo_stack: LocalStack) -> None:
    """So every answer can be had again."""
    with Client(demo_stack.gateway_address) as client:
        answer = client.generate("Once upon a time", max_tokens=24)
        again = client.generate("Once upon a time", max_tokens=24, seed=answer.accepted.seed)

    assert answer.text == again.text
