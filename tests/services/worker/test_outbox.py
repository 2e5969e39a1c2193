"""What a worker still has to send: reports that are not acknowledged, and requests for specifications."""

from __future__ import annotations

from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.v1 import worker_link_pb2 as pb
from worker_svc.link.missing import MISSING_AGAIN_S, MissingSpecifications
from worker_svc.link.outbox import Outbox

NEWEST = max(PROTOCOL_VERSIONS)


def numbers(message: pb.RoundReports) -> list[int]:
    return [report.number for report in message.reports]


def test_what_is_acknowledged_before_it_is_sent_again_is_not_sent_again() -> None:
    outbox = Outbox()
    for number in (1, 2, 3):
        outbox.add(pb.RoundReport(number=number), tokens=1)
    assert numbers(outbox.next_message(NEWEST)) == [1, 2, 3]

    outbox.offer_again()
    outbox.acknowledge(2)

    assert numbers(outbox.next_message(NEWEST)) == [3]
    assert not outbox.unsent
    assert len(outbox) == 1, "it is kept until it is acknowledged"


def test_a_specification_that_came_may_be_requested_again_at_once() -> None:
    missing = MissingSpecifications()
    missing.request(["a", "b"], 1.0)
    assert list(missing.next_message().request_ids) == ["a", "b"]
    missing.arrived("a")

    missing.request(["a", "b"], 1.0 + MISSING_AGAIN_S / 2)
    assert list(missing.next_message().request_ids) == ["a"], "a newer lease may need it"
    missing.request(["b"], 1.0 + MISSING_AGAIN_S)
    assert list(missing.next_message().request_ids) == ["b"]
