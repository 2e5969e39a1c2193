"""The shards that a gateway submits to: which of them gets a new request, and where an existing one lives.

    shards = Shards(settings)
    run = asyncio.create_task(shards.run())           # until cancelled: the links, and changes of the shards file
    link, stream, acceptance = await shards.place(submit, deadline=None, wait_s=30)
    link = shards.link_of(request_id)

A new request goes to the shard where it is expected to wait least, by what the leaders say about their queues every second.
One that a shard cannot take (full, record away) is offered to the next best. An idempotency key belongs to the shard that
claimed it first; whoever else is asked names that shard.

With a shards file (`LAPS_SD_SHARDS_FILE`) shards come and go while traffic runs. One that is taken out of the file, or marked
as draining, gets no new requests; its link stays for as long as a stream of it is open.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.link import ShardLink
from gateway.settings import GatewaySettings
from gateway.streams import Acceptance, ClientStream
from gateway.validation import shard_of
from laps_sd.errors import LapsSdError, NotFound, StartupError, Unavailable
from laps_sd.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.wire import seed_problems

__all__ = ["ShardPlace", "Shards", "new_request_id", "parse_shards"]

log = get_logger(__name__)

LOOK_EVERY_S = 1.0
"""How often the shards file is read."""
MAX_FILE_BYTES = 1024 * 1024
BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
ID_CHARACTERS = 26  # 130 bits
ISSUED_ID = re.compile(rf"[A-Za-z0-9_-]+\.[{BASE32}]{{{ID_CHARACTERS}}}")
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")

Refused = link_pb2.SubmitRefused


def new_request_id(shard: str) -> str:
    """Names the shard; the rest is chance, so that no two gateways issue the same."""
    return f"{shard}.{''.join(secrets.choice(BASE32) for _ in range(ID_CHARACTERS))}"


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard's schedulers are."""

    shard: str
    seeds: tuple[str, ...]
    draining: bool = False
    """No new requests."""


def parse_shards(text: str) -> list[ShardPlace]:
    """The shards file: one line `NAME HOST:PORT[,HOST:PORT …] [draining]` per shard; `#` begins a comment.

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
        if not SHARD.fullmatch(name):
            raise ValueError(
                f"line {number}: a shard is named by 1 to 63 letters, digits, - and _, got {name!r}"
            )
        if name in places:
            raise ValueError(f"line {number}: shard {name!r} is there already")
        for problem in seed_problems(seeds):
            raise ValueError(f"line {number}: the schedulers of shard {name!r} {problem}")
        places[name] = ShardPlace(name, seeds, draining=len(words) == 3)
    if not any(not place.draining for place in places.values()):
        raise ValueError("it must name at least one shard that is not draining")
    return list(places.values())


class Shards:
    """See the top of this file. One task runs `run`; everything else may be called from any task of the same loop."""

    def __init__(self, settings: GatewaySettings, *, rng: random.Random | None = None) -> None:
        """Raises StartupError when the shards file cannot be used."""
        self._settings = settings
        self._rng = rng or random.Random()
        self._links: dict[str, ShardLink] = {}
        self._named: set[str] = set()
        """In the shards file. The others are draining: their last streams are served."""
        self._draining: set[str] = set()
        self._removed: set[str] = set()
        """Were in the file, and have drained."""
        self._text = ""  # of the shards file, as it was last read
        if settings.shards_file is None:
            places = [ShardPlace(settings.shard, settings.scheduler_seeds)]
        else:
            try:
                self._text = _read(settings.shards_file)
                places = parse_shards(self._text)
            except (OSError, ValueError) as error:
                raise StartupError(
                    f"The shards file {settings.shards_file} cannot be used: {error}."
                ) from error
        self._apply(places)

    @property
    def links(self) -> Mapping[str, ShardLink]:
        """Those of all shards, draining ones too."""
        return self._links

    @property
    def streams(self) -> int:
        """Open client streams."""
        return sum(len(link.streams) for link in self._links.values())

    @property
    def workers(self) -> int:
        """Connected workers, as the leaders said last."""
        return sum(link.load.workers for link in self._links.values() if link.load is not None)

    @property
    def refusal(self) -> str:
        """The reasons why every shard would refuse any new request now; empty where one would accept it."""
        reasons = [link.refusal for link in self._open()]
        return "; ".join(reasons) if all(reasons) else ""

    def link_of(self, request_id: str) -> ShardLink:
        """Where a request lives. Raises NotFound; Unavailable for a shard that the shards file may only not name yet.

        The file reaches the gateways one after the other. Until this one has it too, an id of a new shard must not be called
        unknown: its client would give up a request that lives.
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
    ) -> tuple[ShardLink, ClientStream, Acceptance]:
        """Submits to the best shard that takes the request; its id is issued here. The caller closes the stream.

        Raises what the first shard refused it for, or Unavailable after `wait_s`.
        """
        tried: set[str] = set()
        candidates = self._open()
        link = self._least_wait([link for link in candidates if link.connected] or candidates)
        first: LapsSdError | None = None
        while True:
            tried.add(link.shard)
            submit.request_id = submit.specification.request_id = new_request_id(link.shard)
            stream = link.submit(submit, deadline=deadline)
            try:
                return link, stream, await link.accepted(stream, wait_s=wait_s)
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
        """Who is asked next; None: nobody."""
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
        if refused.reason in (Refused.REASON_QUEUE_FULL, Refused.REASON_STORE_UNAVAILABLE):
            others = [link for link in self._open() if link.connected and link.shard not in tried]
            return self._least_wait(others) if others else None
        return None

    def _least_wait(self, links: list[ShardLink]) -> ShardLink:
        """Equal waits: who got fewer requests since the leaders last spoke; then chance, so that gateways differ."""
        loads = [link.load for link in links if link.load is not None]
        # Shards of one pool serve requests of one kind: an empty one learns from the others what a request takes.
        request_s = max((load.backlog_s / load.requests for load in loads if load.requests), default=0.0)
        return min(
            links, key=lambda link: (link.expected_wait_s(request_s), link.submitted, self._rng.random())
        )

    def _known(self, shard: str) -> ShardLink | None:
        """One that was written into the file a moment ago is known as well."""
        if shard not in self._links:
            self._look()
        return self._links.get(shard)

    def _open(self) -> list[ShardLink]:
        return [link for shard, link in self._links.items() if shard not in self._draining]

    # ---- shards come and go

    async def run(self) -> None:
        """Keeps a connection to the leader of each shard, for ever. Raises what a link failed with."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for shard, link in self._links.items():
                    if shard not in tasks:
                        tasks[shard] = asyncio.create_task(link.run(), name=f"link to shard {shard}")
                for shard in [shard for shard in tasks if shard not in self._links]:
                    task = tasks.pop(shard)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
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
        """Returns once a leader of any shard has greeted."""
        while not any(link.greeted.is_set() for link in self._links.values()):
            # For a while only: the shards may be others by then.
            waiting = [asyncio.create_task(link.greeted.wait()) for link in self._links.values()]
            try:
                await asyncio.wait(waiting, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    def _look(self) -> None:
        """Takes up a change of the shards file. One that cannot be used changes nothing, and is said once."""
        path = self._settings.shards_file
        if path is None:
            return
        try:
            text = _read(path)
        except OSError as error:
            text = f"# unreadable: {error}"
        if text != self._text:
            self._text = text
            try:
                places = parse_shards(text)
            except ValueError as error:
                log.error("the shards file cannot be used: the shards stay", path=str(path), error=str(error))
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
                self._links[place.shard] = ShardLink(self._settings, place.shard, seeds=place.seeds)
            else:
                link.seeds = list(place.seeds)
        self._draining = {place.shard for place in places if place.draining}
        self._draining |= {shard for shard in self._links if shard not in self._named}


def _read(path: Path) -> str:
    with path.open("rb") as file:
        octets = file.read(MAX_FILE_BYTES + 1)
    if len(octets) > MAX_FILE_BYTES:
        raise OSError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return octets.decode(errors="replace")
