"""A worker has the list that its scheduler has made, sent whole or as changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.service.leader_link import LinkBroken
from laps_sd.v1 import worker_link_pb2 as pb
from scheduler_svc.core.commands import AssignEntry
from scheduler_svc.leader.sessions import WorkerSession
from worker_svc.link.lists import AssignedList


def entry(request_id: str, index_s: float = 1.0, lease_epoch: int = 1) -> AssignEntry:
    return AssignEntry(request_id, lease_epoch, 0, index_s, 0.5, False, True)


def session(version: int = 2) -> WorkerSession:
    return WorkerSession("w", "w", "cpu", protocol_version=version)


def sent(to: WorkerSession, entries: list[AssignEntry]) -> pb.Assignment:
    """Send a list, and return the message on the wire."""
    to.assign(entries)
    [reply] = to.take()
    return pb.WorkerLinkReply.FromString(reply.SerializeToString()).assignment


ENTRIES = st.builds(entry, st.sampled_from("abcdef"), st.sampled_from([1.0, 2.0]), st.integers(1, 2))
LISTS = st.lists(st.lists(ENTRIES, unique_by=lambda one: one.request_id), min_size=1, max_size=6)


@given(lists=LISTS, version=st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_the_worker_has_every_list_as_it_was_made(lists: list[list[AssignEntry]], version: int) -> None:
    async def check() -> None:
        scheduler, worker = session(version), AssignedList()
        for entries in lists:
            has = {one.request_id: one for one in worker.take(sent(scheduler, entries))}
            assert has.keys() == {one.request_id for one in entries}
            for one in entries:
                got = has[one.request_id]
                assert (got.lease_epoch, got.index_s) == (one.lease_epoch, one.index_s)

    asyncio.run(check())


async def test_only_what_has_changed_is_sent() -> None:
    scheduler = session()
    a, b, c = entry("a"), entry("b"), entry("c")
    sent(scheduler, [a, b, c])

    changed = sent(scheduler, [a, entry("b", 2.0), entry("d")])

    assert (changed.number, changed.changes) == (2, 1)
    assert [one.request_id for one in changed.entries] == ["b", "d"]
    assert list(changed.removed) == ["c"]


async def test_lists_that_were_not_sent_leave_no_trace() -> None:
    """The newest one counts, as changes of the one that the worker has."""
    scheduler, worker = session(), AssignedList()
    a, b = entry("a"), entry("b")
    worker.take(sent(scheduler, [a]))
    scheduler.assign([b])

    newest = worker.take(sent(scheduler, [a, b]))

    assert [one.request_id for one in newest] == ["a", "b"]


async def test_a_version_1_worker_gets_whole_lists() -> None:
    scheduler = session(1)
    sent(scheduler, [entry("a")])
    whole = sent(scheduler, [entry("a"), entry("b")])
    assert (whole.changes, len(whole.entries)) == (0, 2)


def test_changes_of_an_unknown_list_break_the_link() -> None:
    worker = AssignedList()
    worker.take(pb.Assignment(number=1))
    with pytest.raises(LinkBroken, match="it changed list 7; the newest is 1"):
        worker.take(pb.Assignment(number=8, changes=7))
