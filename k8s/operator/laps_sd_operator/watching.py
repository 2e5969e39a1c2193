"""A copy of the objects of one kind, kept up to date by a list and then watches.

    pods = Watched(api, "/api/v1/namespaces/models/pods", changed=wake, labelSelector="laps-sd.dev/speculative-pool")
    task = asyncio.create_task(pods.run())
    await pods.listed.wait()
    pods.objects["a-7c9f-x2x"]

A watch continues from the version of the last message, which bookmarks keep recent; the API server ends it after
WATCH_S. A new list is needed only when that version has expired (410), or after an answer that makes no sense. After
a failure the next try waits for a pause that doubles up to a limit. `age_s` is the time since the API server last
showed that it serves the watch.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import aiohttp
from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.service.log import get_logger
from laps_sd_operator.answers import EXPIRED, GONE, body_of
from laps_sd_operator.api import Api

WATCH_S = 120.0
"""Seconds after which the API server ends a watch. It sends a bookmark about once a minute."""
SPARE_S = 10.0
"""Seconds beyond WATCH_S after which the operator ends a watch that the API server did not end."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

Object = dict[str, Any]
Changed = Callable[[Object | None, Object | None], None]

log = get_logger("operator")


class NotDefined(Exception):
    """The API server does not serve this kind of object."""


class Watched:
    """Objects of one kind, by their names. `changed` gets an object before and after its change; None: there was or
    is none. `clock` returns seconds. `selectors`: queries of the list and the watches.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        *,
        changed: Changed,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        **selectors: str,
    ) -> None:
        self.kind = path.rpartition("/")[2]
        self.objects: dict[str, Object] = {}
        self.listed = asyncio.Event()
        """Set once the objects have been listed."""
        self._api, self._path, self._selectors, self._changed = api, path, selectors, changed
        self._pause_s = first_pause_s, longest_pause_s
        self._version: str | None = None
        """Version up to which `objects` is known; None: a list is needed."""
        self._clock = clock
        self._shown_s = clock()
        self._failed = ""

    def age_s(self) -> float:
        """Return the seconds since the API server last answered or sent a message; before that, since the start."""
        return self._clock() - self._shown_s

    async def run(self) -> NoReturn:
        """Keep the copy up to date without end. Raises NotDefined if the API server does not serve the kind."""
        pauses = self._pauses()
        while True:
            try:
                if self._version is None:
                    await self._list()
                if await self._watch():
                    pauses = self._pauses()
                    continue
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                self._log_once(repr(error))
            except ApiException as error:
                if error.status == GONE:
                    raise NotDefined(self._path) from error
                self._version = None
                if error.status != EXPIRED:
                    self._log_once(f"{error.status} {error.reason}: {body_of(error)}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._version = None
                self._log_once(f"a message that is not one of a watch: {error!r}")
            await asyncio.sleep(next(pauses))

    def _pauses(self) -> Iterator[float]:
        pause_s, longest_s = self._pause_s
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(2 * pause_s, longest_s)

    async def _list(self) -> None:
        found = await self._api.call("GET", self._path, **self._selectors)
        objects = {one["metadata"]["name"]: _trimmed(one) for one in found["items"]}
        version = str(found["metadata"]["resourceVersion"])
        before, self.objects, self._version = self.objects, objects, version
        self._shown()
        for name in before.keys() | objects.keys():
            if before.get(name) != objects.get(name):
                self._changed(before.get(name), objects.get(name))
        self.listed.set()

    async def _watch(self) -> bool:
        """Follow one watch to its end; return whether it brought at least one message."""
        assert self._version is not None
        query = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{WATCH_S:.0f}",
        }
        brought = False
        async with self._api.stream(
            self._path, limit_s=WATCH_S + SPARE_S, **self._selectors, **query
        ) as lines:
            self._shown()
            while line := await lines.readline():
                self._take(json.loads(line))
                self._shown()
                brought = True
        return brought

    def _take(self, message: Object) -> None:
        kind, found = message["type"], message["object"]
        if kind == "ERROR":
            error = ApiException(status=found.get("code"), reason=found.get("reason"))
            error.body = str(found.get("message")).encode()
            raise error
        name, version = found["metadata"].get("name"), str(found["metadata"]["resourceVersion"])
        if kind in ("ADDED", "MODIFIED"):
            before = self.objects.get(name)
            self.objects[name] = _trimmed(found)
            self._changed(before, found)
        elif kind == "DELETED":
            self._changed(self.objects.pop(name, found), None)
        elif kind != "BOOKMARK":
            raise ValueError(f"type {kind!r}")
        self._version = version

    def _shown(self) -> None:
        self._shown_s = self._clock()
        if self._failed:
            log.info("watches again", resource=self.kind)
        self._failed = ""

    def _log_once(self, failed: str) -> None:
        # The API server may be unreachable for long.
        if failed != self._failed:
            log.warning("cannot watch; tries again", resource=self.kind, error=failed)
        self._failed = failed


def _trimmed(found: Object) -> Object:
    """Return the object without the longest field that nothing here reads."""
    found["metadata"].pop("managedFields", None)
    return found
