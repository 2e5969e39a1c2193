"""Read the text while it is generated."""

from __future__ import annotations

from laps_sd.client import Accepted, Client, Delta, Ended
from laps_sd.stack.local import LocalStack


def test_a_stream_is_accepted_then_deltas_then_the_end(fake_stack: LocalStack) -> None:
    """`Accepted` comes first and names the request: from then on it survives the crash of any process."""
    with Client(fake_stack.gateway_address) as client:
        first, *deltas, last = client.stream("Once upon a time", max_tokens=40)

    assert isinstance(first, Accepted)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(last, Ended)
    assert first.request_id == last.request_id


def test_deltas_add_up_to_the_whole_answer(fake_stack: LocalStack) -> None:
    """A delta holds the new text since the one before it, and is never taken back."""
    with Client(fake_stack.gateway_address) as client:
        events = list(client.stream("Once upon a time", max_tokens=40, seed=5))
        whole = client.generate("Once upon a time", max_tokens=40, seed=5)

    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.first_token for delta in deltas] == [
        sum(len(before.token_ids) for before in deltas[:n]) for n in range(len(deltas))
    ]
