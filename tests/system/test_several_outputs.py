"""A call of more outputs than the queue has room for completes: a retry with its key finds those that were accepted."""

from __future__ import annotations

from laps_sd.client import Client
from laps_sd.v1.inference_pb2 import FINISH_REASON_LENGTH
from tests.conftest import StackMaker

ROOM, OUTPUTS = 3, 8


def test_a_call_of_more_outputs_than_there_is_room_for_completes_by_retries(make_stack: StackMaker) -> None:
    stack = make_stack(workers=1, environment={"LAPS_SD_MAX_REQUESTS": str(ROOM)})

    with Client(stack.gateway_address, retry_s=60) as client:
        answer = client.generate("Once", n=OUTPUTS, seed=1, max_tokens=20, ignore_eos=True)

    outputs = [answer, *answer.more]
    assert [output.end.finish_reason for output in outputs] == [FINISH_REASON_LENGTH] * OUTPUTS
    assert len({output.end.request_id for output in outputs}) == OUTPUTS
