"""Same seed, same text."""

from __future__ import annotations

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack


def test_the_same_seed_gives_the_same_text(demo_stack: LocalStack) -> None:
    """The token at a position depends on the seed, the position and the target model, and on nothing else.

    This test runs the shipped models, because it is about them.
    """
    with Client(demo_stack.gateway_address) as client:
        first = client.generate("Once upon a time", seed=7, max_tokens=24)
        again = client.generate("Once upon a time", seed=7, max_tokens=24)
        other = client.generate("Once upon a time", seed=8, max_tokens=24)

    assert first.text == again.text
    assert first.text != other.text


def test_speculation_changes_the_speed_and_not_the_text(demo_stack: LocalStack) -> None:
    """The text is the same with or without the draft model, and for any length of its proposals."""
    with Client(demo_stack.gateway_address) as client:
        texts = {
            client.generate("Once upon a time", seed=7, max_tokens=24, speculation=speculation).text
            for speculation in ("auto", "off", 2)
        }

    assert len(texts) == 1


def test_a_request_without_a_seed_is_told_the_one_it_got(demo_stack: LocalStack) -> None:
    """The returned seed reproduces every answer."""
    with Client(demo_stack.gateway_address) as client:
        answer = client.generate("Once upon a time", max_tokens=24)
        again = client.generate("Once upon a time", max_tokens=24, seed=answer.accepted.seed)

    assert answer.text == again.text


def test_a_start_that_is_known_is_not_computed_again_and_changes_nothing(demo_stack: LocalStack) -> None:
    """The KV of a common prefix is reused across clients; `LAPS_SD_PREFIX_REUSE_TOKENS` of the worker sets
    the least length, and turns it off."""
    story = "Once upon a time there was a worker that had read all of this before. " * 8
    with Client(demo_stack.gateway_address) as client:
        first = client.generate(story + "It yawned", seed=7, max_tokens=24)
        again = client.generate(story + "It yawned", seed=7, max_tokens=24)
        other = client.generate(story + "Then it", seed=7, max_tokens=24)

    assert first.text == again.text != other.text
    assert first.end.usage.cached_prompt_tokens == 0
    for answer in (again, other):
        assert 64 <= answer.end.usage.cached_prompt_tokens < answer.end.usage.prompt_tokens
