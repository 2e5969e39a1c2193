"""A short request overtakes a long one."""

from __future__ import annotations

from collections.abc import Callable

from laps_sd.client import Accepted, Client, Delta, Ended
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1.inference_pb2 import GenerateResponse
from tests.conftest import StackMaker


def test_a_short_request_overtakes_a_long_one_and_explain_tells_it(
    make_stack: StackMaker, calm: Callable[..., GenerateResponse]
) -> None:
    """One worker has room for one request: the long one is paused between two rounds, and loses nothing.

    The hints give the expected lengths. Without them the scheduler learns the length, from the lengths of
    earlier requests and from the acceptance of this one.
    """
    stack = make_stack(slots=1)
    with Client(stack.gateway_address) as client:
        story = client.stream("A long story", seed=1, max_tokens=200, expected_output_tokens=200)
        accepted = next(story)
        assert isinstance(accepted, Accepted)
        first = next(story)  # it runs
        client.generate("A word", max_tokens=8, expected_output_tokens=8)

        meanwhile = client.explain(accepted.request_id)
        events = list(story)
        afterwards = client.explain(accepted.request_id)

    assert meanwhile.state != pb.Explanation.STATE_ENDED, "the short one came later and ended first"
    what_happened = [line.what for line in afterwards.story]
    assert what_happened.index("started") < what_happened.index("paused") < what_happened.index("resumed")
    *deltas, end = events
    assert isinstance(end, Ended)
    assert end.timing.preemptions == afterwards.preemptions >= 1
    text = "".join(event.text for event in [first, *deltas] if isinstance(event, Delta))
    assert text == calm("A long story", seed=1, max_tokens=200).text
