"""Acknowledgements travel with other messages of their stream, where a worker reads them there."""

from __future__ import annotations

from scheduler_svc.leader.sessions import WorkerSession


def session(version: int = 2) -> WorkerSession:
    return WorkerSession("w", "w", "cpu", protocol_version=version)


async def test_one_that_waits_goes_with_the_last_message_that_is_due() -> None:
    worker = session()
    worker.acknowledge(2)
    worker.acknowledge(3)
    assert worker.take() == []

    worker.drop((("r", 1),))
    worker.assign([])
    [drop, assignment] = worker.take()

    assert (drop.WhichOneof("message"), drop.acknowledged_number) == ("drop", 0)
    assert (assignment.WhichOneof("message"), assignment.acknowledged_number) == ("assignment", 3)


async def test_it_is_sent_once() -> None:
    worker = session()
    worker.acknowledge(3)
    worker.assign([])
    worker.take()

    worker.assign([])
    [again] = worker.take()

    assert again.acknowledged_number == 0


async def test_it_goes_alone_where_nothing_else_is_due_for_long() -> None:
    worker = session()
    worker.acknowledge(3)
    worker._acknowledge_alone()

    [reply] = worker.take()

    assert (reply.acknowledged.number, reply.acknowledged_number) == (3, 0)


async def test_a_worker_of_version_1_gets_it_as_a_message_of_its_own() -> None:
    worker = session(version=1)
    worker.acknowledge(3)
    worker.assign([])

    [assignment, acknowledged] = worker.take()

    assert assignment.acknowledged_number == 0
    assert acknowledged.acknowledged.number == 3
