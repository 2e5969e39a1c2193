"""Faults of the network between components."""

from __future__ import annotations

import asyncio

from bench._faults.plans import Fault
from bench._faults.processes import Processes
from bench._proxy import BOTH, Direction, Proxy
from laps_sd.stack.local import LocalStack

LONGEST_DELAY_S = 0.4
"""Upper bound of the delay of each piece of data on a slow connection, in seconds."""


class Network:
    """Connections through the proxies, each of which stands before a component."""

    def __init__(
        self, stack: LocalStack, proxies: dict[str, Proxy], processes: Processes, own_pid: int
    ) -> None:
        """`own_pid` is the process of the clients."""
        self._stack = stack
        self._proxies = proxies
        self._processes = processes
        self._own_pid = own_pid

    async def disturb(self, how: str, what: list[str], victim: str, fault: Fault) -> None:
        """Disturb the network: a worker or gateway from its leader, the leader from the record, clients from
        a gateway.
        """
        if what == ["clients"]:
            pid, targets = self._own_pid, [victim]
        else:
            pid = self._stack.children[victim].pid or 0
            targets = ["valkey"] if what[-1] == "record" else self._processes.schedulers()
        proxies = [self._proxies[target] for target in targets]
        if how == "cut":
            for proxy in proxies:
                proxy.cut(pid)
            return
        half: Direction = "up" if fault.draw < 0.5 else "down"
        for proxy in proxies:
            if how == "delay":
                proxy.delay(pid, LONGEST_DELAY_S * fault.draw)
            else:
                proxy.hold(pid, BOTH if how == "silence" else (half,))
        await asyncio.sleep(fault.lasts_s)
        for proxy in proxies:
            proxy.release(pid)

    async def leave_half_open(self, victim: str, fault: Fault) -> None:
        """Simulate the loss of a machine: the process ends, and its peers get no notice until their
        connections are released.
        """
        pid = self._stack.children[victim].pid or 0
        proxies = [self._proxies[name] for name in self._processes.schedulers()]
        for proxy in proxies:
            proxy.hold(pid, BOTH)
        self._processes.kill(victim)
        await asyncio.sleep(fault.down_s)
        await self._processes.start(victim)
        await asyncio.sleep(fault.lasts_s)
        for proxy in proxies:
            proxy.release(pid)
