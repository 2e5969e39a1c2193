"""Calls of the leader of a shard, whichever of its schedulers that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import grpc
import typer

from laps_sd.cli import dial
from laps_sd.errors import retry_after_s
from laps_sd.service.leader_link import Candidates, named_leader
from laps_sd.service.wire import Tls

__all__ = ["Leader"]

NOT_THE_LEADER = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""Status codes after which another scheduler may answer; the last: one that is paused, or whose network is broken."""

Reply = TypeVar("Reply")


class Leader:
    """The leader of one shard. Its channel is kept from call to call; calls are made one at a time.

    Methods may be called from any thread.
    """

    def __init__(self, seeds: str, tls: Tls) -> None:
        """Take addresses of schedulers, host:port[,host:port ...]. Raises typer.BadParameter."""
        self._seeds = [address.strip() for address in seeds.split(",") if address.strip()]
        if not self._seeds:
            raise typer.BadParameter("give at least one scheduler as host:port")
        for address in self._seeds:
            dial.endpoint(address, tls)
        self._tls = tls
        self._calling = threading.Lock()
        self._kept: tuple[str, grpc.Channel] | None = None
        self.closed = False

    @property
    def seeds(self) -> str:
        """Return the addresses to dial."""
        return ",".join(self._seeds)

    def call(self, call: Callable[[grpc.Channel], Reply]) -> Reply:
        """Call the leader: the last one, then each address in turn, and those that standbys refer to. One
        that does not answer in time is left for the next.

        Raises grpc.RpcError: of several errors, the one that explains most.
        """
        with self._calling:
            candidates = Candidates([*([self._kept[0]] if self._kept else []), *self._seeds])
            errors: list[grpc.RpcError] = []
            while (address := candidates.next_address()) is not None:
                try:
                    return call(self._channel_to(address))
                except typer.BadParameter:  # the seeds are addresses: a standby referred to something else
                    continue
                except grpc.RpcError as error:
                    code = error.code() if isinstance(error, grpc.Call) else None
                    if code not in NOT_THE_LEADER:
                        raise
                    errors.append(error)
                    if code is grpc.StatusCode.FAILED_PRECONDITION and isinstance(error, grpc.Call):
                        candidates.refer(named_leader(error.details() or ""))
            raise max(errors, key=_explains)  # there is at least one address

    def _channel_to(self, address: str) -> grpc.Channel:
        if self._kept is None or self._kept[0] != address:
            before, self._kept = self._kept, (address, dial.channel(address, self._tls))
            if before is not None:
                before[1].close()
            if self.closed:
                self._kept[1].close()
        return self._kept[1]

    def close(self) -> None:
        """Close the channel. A call that is under way ends with CANCELLED, later ones with ValueError."""
        self.closed = True
        kept = self._kept
        if kept is not None:
            kept[1].close()


def _explains(error: grpc.RpcError) -> int:
    """Return the rank of an error by how much it explains."""
    code = error.code() if isinstance(error, grpc.Call) else None
    if retry_after_s(error) is not None:  # a leader answered
        return 4
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # a server is there
        return 3
    if code is grpc.StatusCode.FAILED_PRECONDITION and isinstance(error, grpc.Call):
        # A standby: the leader that it names was called too.
        return 0 if named_leader(error.details() or "") else 2
    return 1
