"""The shards that a gateway submits to: selects the shard of a new request, and finds the shard of an
existing one.

    shards = Shards(settings)
    run = asyncio.create_task(shards.run())           # until cancelled: the links, and changes of the shards file
    link, stream, acceptance = await shards.place(submit, deadline=None, wait_s=30)
    link = shards.link_of(request_id)

A new request goes to the shard with the shortest expected wait, from the reports that the leaders send about
their queues every second. A request that a shard cannot take (queue full, record unavailable, too long for its
workers) is offered to the next best shard. An idempotency key belongs to the shard that claimed it first; every other shard refuses
the key and names that shard.

With a shards file (`LAPS_SD_SHARDS_FILE`) shards can be added and removed while traffic runs. A shard that is
removed from the file, or marked as draining, gets no new requests; its link stays as long as one of its
streams is open.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Container, Mapping
from dataclasses import dataclass

from gateway import metrics
from gateway.links.link import AcceptedStream, ShardLink
from gateway.links.request_ids import shard_of
from gateway.settings import GatewaySettings
from laps_sd.contract.shard_names import SHARD_NAME, SHARD_NAME_RULE
from laps_sd.errors import LapsSdError, NotFound, StartupError, Unavailable
from laps_sd.service.files import read_bounded
from laps_sd.service.log import get_logger
from laps_sd.service.wire import link_tls, seed_problems
from laps_sd.v1 import gateway_link_pb2 as link_pb2

__all__ = ["ShardPlace", "Shards", "new_request_id", "parse_shards"]

log = get_logger(__name__)

LOOK_EVERY_S = 1.0
"""Interval between two reads of the shards file, in seconds."""
MAX_FILE_BYTES = 1024 * 1024
BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
ID_CHARACTERS = 26  # 130 bits
ISSUED_ID = re.compile(rf"[A-Za-z0-9_-]+\.[{BASE32}]{{{ID_CHARACTERS}}}")

Refused = link_pb2.SubmitRefused
OF_ONE_SHARD = (Refused.REASON_QUEUE_FULL, Refused.REASON_STORE_UNAVAILABLE, Refused.REASON_INVALID)
"""Reasons for which another shard may accept the request. INVALID: no worker of the shard can hold it."""


def new_request_id(shard: str) -> str:
    """Return a request id that names the shard; the rest is random, so that no two gateways issue the same
    id."""
    return f"{shard}.{''.join(secrets.choice(BASE32) for _ in range(ID_CHARACTERS))}"


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Addresses of a shard's schedulers."""

    shard: str
    seeds: tuple[str, ...]
    draining: bool = False
    """True if the shard gets no new requests."""


def parse_shards(text: str) -> list[ShardPlace]:
    """Parse the shards file: one line `NAME HOST:PORT[,HOST:PORT …] [draining]` per shard; `#` begins a
    comment.

    Raises ValueError with a sentence that names the line.
    """
    places: dict[str, ShardPlace] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) not in (2, 3) or words[2:] not in ([], ["draining"]):
            raise ValueError(f"line {number} must be NAME HOST:PORT[,HOST:PORT …] [draining]")
        name, seeds = words[0], tuple(seed for seed in words[1].split(",") if seed)
        if not SHARD_NAME.fullmatch(name):
            raise ValueError(f"line {number}: the name of a shard must be {SHARD_NAME_RULE}, got {name!r}")
        if name in places:
            raise ValueError(f"line {number}: shard {name!r} is there already")
        for problem in seed_problems(seeds):
            raise ValueError(f"line {number}: the schedulers of shard {name!r} {problem}")
        places[name] = ShardPlace(name, seeds, draining=len(words) == 3)
    if not any(not place.draining for place in places.values()):
        raise ValueError("it must name at least one shard that is not draining")
    return list(places.values())


class Shards:
    """The links to all shards, see the top of this file. One task runs `run`; everything else may be called
    from any task of the same loop."""

    def __init__(self, settings: GatewaySettings, vocabulary: bytes = b"") -> None:
        """Read the shards file, if there is one. Raises StartupError if it cannot be used. `vocabulary`: see `Mismatches`."""
        self._settings = settings
        self._tls = link_tls(settings)
        self._vocabulary = vocabulary
        self._rng = random.Random()
        self._links: dict[str, ShardLink] = {}
        self._named: set[str] = set()
        """Shards in the shards file. The others are draining: their last streams are served."""
        self._draining: set[str] = set()
        self._removed: set[str] = set()
        """Shards that were in the file, and have drained."""
        self._text = ""  # the last text read from the shards file
        if settings.shards_file is None:
            places = [ShardPlace(settings.shard, settings.scheduler_seeds)]
        else:
            try:
                self._text = read_bounded(settings.shards_file, MAX_FILE_BYTES)
                places = parse_shards(self._text)
            except (OSError, ValueError) as error:
                raise StartupError(
                    f"The shards file {settings.shards_file} cannot be used: {error}."
                ) from error
        self._apply(places)

    @property
    def links(self) -> Mapping[str, ShardLink]:
        """Return the links of all shards, including draining ones."""
        return self._links

    @property
    def streams(self) -> int:
        """Return the number of open client streams."""
        return sum(len(link.streams) for link in self._links.values())

    @property
    def workers(self) -> int:
        """Return the number of connected workers, from the leaders' latest reports."""
        return sum(link.load.workers for link in self._links.values() if link.load is not None)

    @property
    def capacity_tokens(self) -> int | None:
        """Return the largest sum of prompt and output tokens that every shard has room for; None if no leader
        has reported one."""
        loads = [link.load for link in self._open() if link.load is not None]
        return min((load.capacity_tokens for load in loads if load.capacity_tokens), default=None)

    @property
    def refusal(self) -> str:
        """Return the reasons why every shard would refuse any new request now; empty if one would
        accept it."""
        reasons = [link.refusal for link in self._open()]
        return "; ".join(reasons) if all(reasons) else ""

    def link_of(self, request_id: str) -> ShardLink:
        """Return the link to the shard of a request. Raises NotFound; Unavailable for a shard that is perhaps
        not in the shards file yet.

        A change of the file reaches the gateways one after the other. Until this gateway has it too, it must
        not report an id of a new shard as unknown: the client would give up a live request.
        """
        shard = shard_of(request_id)
        link = self._known(shard)
        may_exist = self._settings.shards_file is not None and shard not in self._removed
        if link is None and not (may_exist and ISSUED_ID.fullmatch(request_id)):
            raise NotFound(f"there is no request {request_id!r}")
        if link is None:
            raise Unavailable(
                f"the request lives in shard {shard!r}, which this gateway's shards file does not name (yet)",
                retry_after_s=LOOK_EVERY_S,
            )
        return link

    async def place(
        self, submit: link_pb2.Submit, *, deadline: float | None, wait_s: float
    ) -> AcceptedStream:
        """Submit to the best shard that takes the request; the request id is issued here. The caller closes
        the stream.

        Raises the first shard's refusal, or Unavailable after `wait_s`.
        """
        tried: set[str] = set()
        link = self._best(self._open())
        first: LapsSdError | None = None
        while True:
            tried.add(link.shard)
            submit.request_id = submit.specification.request_id = new_request_id(link.shard)
            stream = link.submit(submit, deadline=deadline)
            try:
                return AcceptedStream(link, stream, await link.accepted(stream, wait_s=wait_s))
            except LapsSdError as error:
                link.close(stream)
                if stream.refused is None or stream.refused.reason != Refused.REASON_KEY_ELSEWHERE:
                    first = first or error
                elsewhere = self._elsewhere(stream.refused, tried)
                if elsewhere is None:
                    raise first or error from None
                link = elsewhere
            except BaseException:
                link.close(stream)
                raise

    def _elsewhere(self, refused: link_pb2.SubmitRefused | None, tried: Container[str]) -> ShardLink | None:
        """Return the shard to try next; None if there is none."""
        if refused is None:
            return None
        if refused.reason == Refused.REASON_KEY_ELSEWHERE:
            link = self._known(refused.shard)
            if link is None:
                raise Unavailable(
                    f"the idempotency key belongs to shard {refused.shard!r}, which this gateway does not know",
                    retry_after_s=LOOK_EVERY_S,
                )
            return link if refused.shard not in tried else None
        if refused.reason in OF_ONE_SHARD:
            others = [link for link in self._open() if link.connected and link.shard not in tried]
            return self._best(others) if others else None
        return None

    def _best(self, links: list[ShardLink]) -> ShardLink:
        """Return the link with the shortest expected wait of those that would accept a request; without one, of
        the connected ones, and without one of these, of all."""
        accepting = [link for link in links if not link.refusal]
        return self._least_wait(accepting or [link for link in links if link.connected] or links)

    def _least_wait(self, links: list[ShardLink]) -> ShardLink:
        """Return the link with the shortest expected wait. Equal waits: the link with fewer requests since
        the leaders' latest reports; then a random one, so that gateways choose differently."""
        loads = [link.load for link in links if link.load is not None]
        # Shards of one pool serve requests of one kind: for an empty shard the time per request is that of
        # the others.
        request_s = max((load.backlog_s / load.requests for load in loads if load.requests), default=0.0)
        return min(
            links, key=lambda link: (link.expected_wait_s(request_s), link.submitted, self._rng.random())
        )

    def _known(self, shard: str) -> ShardLink | None:
        """Return a shard's link, also if the shard was added to the file a moment ago."""
        if shard not in self._links:
            self._look()
        return self._links.get(shard)

    def _open(self) -> list[ShardLink]:
        return [link for shard, link in self._links.items() if shard not in self._draining]

    # ---- changes of the shards

    async def run(self) -> None:
        """Keep a connection to the leader of each shard until cancelled. Raises the failure of a link."""
        tasks: dict[ShardLink, asyncio.Task[None]] = {}
        try:
            while True:
                for link in [link for link in tasks if self._links.get(link.shard) is not link]:
                    task = tasks.pop(link)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    if link.shard not in self._links:  # it may have been added again
                        metrics.forget_shard(link.shard)
                for shard, link in self._links.items():
                    if link not in tasks:
                        tasks[link] = asyncio.create_task(link.run(), name=f"link to shard {shard}")
                done, _ = await asyncio.wait(
                    tasks.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                self._look()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def greeted(self) -> None:
        """Return once a leader of any shard has greeted."""
        while not any(link.greeted.is_set() for link in self._links.values()):
            # The wait is limited: the shards may have changed by then.
            waiting = [asyncio.create_task(link.greeted.wait()) for link in self._links.values()]
            try:
                await asyncio.wait(waiting, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    def _look(self) -> None:
        """Apply a change of the shards file. An unusable file changes nothing, and is logged once."""
        path = self._settings.shards_file
        if path is None:
            return
        unreadable: OSError | None = None
        try:
            text = read_bounded(path, MAX_FILE_BYTES)
        except OSError as error:
            text, unreadable = f"# unreadable: {error}", error
        if text != self._text:
            self._text = text
            try:
                places = parse_shards(text)
            except ValueError as error:
                problem = str(unreadable or error)
                log.error("the shards file cannot be used: the shards stay", path=str(path), error=problem)
            else:
                self._apply(places)
                log.info("shards", shards=[place.shard for place in places], draining=sorted(self._draining))
        for shard in [shard for shard in self._draining if shard not in self._named]:
            if not self._links[shard].streams:
                del self._links[shard]
                self._draining.discard(shard)
                self._removed.add(shard)

    def _apply(self, places: list[ShardPlace]) -> None:
        self._named = {place.shard for place in places}
        self._removed -= self._named
        for place in places:
            link = self._links.get(place.shard)
            if link is None:
                self._links[place.shard] = ShardLink(
                    self._settings,
                    place.shard,
                    seeds=place.seeds,
                    tls=self._tls,
                    vocabulary=self._vocabulary,
                )
            else:
                link.seeds = list(place.seeds)
        self._draining = {place.shard for place in places if place.draining}
        self._draining |= {shard for shard in self._links if shard not in self._named}
