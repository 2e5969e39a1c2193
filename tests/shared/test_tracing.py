"""The context of a trace: which headers are accepted, and what follows from a request."""

from __future__ import annotations

import socket
import threading

import pytest

from laps_sd.service.tracing import Parent, Tracing, parent_of, span_id_of, valid_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_sampled_context_is_a_parent() -> None:
    parent = parent_of(f"00-{TRACE}-{SPAN}-01")

    assert parent == Parent(int(TRACE, 16), int(SPAN, 16))
    assert parent is not None
    assert parent.traceparent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("flags", ["03", "ff"])
def test_further_flags_beside_sampled_do_no_harm(flags: str) -> None:
    assert parent_of(f"00-{TRACE}-{SPAN}-{flags}") is not None


@pytest.mark.parametrize("flags", ["00", "02"])
def test_what_is_not_sampled_is_passed_on_and_not_drawn(flags: str) -> None:
    value = f"00-{TRACE}-{SPAN}-{flags}"

    assert valid_traceparent(value) == value
    assert parent_of(value) is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        "00-xyz-1-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_a_trace_context_that_is_none_is_dropped(value: str) -> None:
    """W3C Trace Context 3.2: zeros and version ff are invalid, letters are small."""
    assert valid_traceparent(value) == ""
    assert parent_of(value) is None


def test_the_id_of_a_lease_is_the_same_in_every_process_and_no_other_leases() -> None:
    assert span_id_of("run", "s0.a", 1) == span_id_of("run", "s0.a", 1) == 0x20B79DB632184BC6
    ids = {span_id_of("run", f"s0.{name}", epoch) for name in "abc" for epoch in range(50)}
    assert len(ids) == 150
    assert all(0 < value < 2**64 for value in ids)


def test_a_collector_that_does_not_answer_does_not_hold_up_the_stop() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = Tracing("gateway", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing.emit("chat", Parent(1, 2), 0.0, 1.0, {})

        tracing.close()

        assert "laps-sd-last-spans" in [thread.name for thread in threading.enumerate()], "it goes on"
