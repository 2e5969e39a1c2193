"""The console over HTTP.

    GET /console, /console/demo            the page; it holds no data, so that it needs no key
    GET /console/assets/NAME               its script, style and recording
    GET /console/api/events                server-sent events: one snapshot of the queues and workers a second
    GET /console/api/requests/ID           the explanation of one request, with its timeline

The paths under `api` take the same keys as every other call. A tenant sees its own requests; a tenant that the
file of tenants marks as an operator sees all, and the workers. Callers without a key see something only at a
gateway that listens on loopback: elsewhere they all are the one tenant `anonymous`, and a stranger could read
and cancel another's requests by their ids.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from gateway.api.console.snapshots import Snapshots
from gateway.api.http_requests import names_this_machine, tenant_of
from gateway.calls.calls import Caller, Calls
from gateway.links.shards import Shards
from gateway.tenants import Tenants
from laps_sd.errors import LapsSdError, NotFound, PermissionDenied, ResourceExhausted, Unauthenticated
from laps_sd.service.keys import ANONYMOUS

__all__ = ["MAX_VIEWERS", "POLICY", "ConsoleRoutes"]

MAX_VIEWERS = 100
"""Streams of snapshots that a gateway sends at once."""
MAX_VIEWERS_OF_TENANT = 20
"""Those of them that one tenant may have."""
RETRY_S = 5.0
STATIC = Path(__file__).with_name("static")
PAGE = "index.html"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: nothing of another server, and no script in the page itself."""
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


class ConsoleRoutes:
    """The handlers of the console."""

    def __init__(self, calls: Calls, tenants: Tenants, shards: Shards, stopping: asyncio.Event) -> None:
        """`stopping`: set when the gateway begins to stop; the streams end then."""
        self._calls = calls
        self._tenants = tenants
        self._local_only = calls.settings.local_only
        self._stopping = stopping
        self._snapshots = Snapshots(shards)
        self._viewers = Counter[str]()
        """Open streams of each tenant."""
        self._files = {path.name: _File(path) for path in STATIC.iterdir() if path.is_file()}

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the endpoints to a router."""
        router.add_get("/console", self._page)
        router.add_get("/console/demo", self._page)
        router.add_get("/console/assets/{name}", self._asset)
        router.add_get("/console/api/events", self._events)
        router.add_get("/console/api/requests/{id}", self._explain)

    async def _page(self, request: web.Request) -> web.Response:
        return self._file(request, PAGE)

    async def _asset(self, request: web.Request) -> web.Response:
        return self._file(request, request.match_info["name"])

    def _file(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound("the console has no such file")
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=file.headers)
        return web.Response(body=file.body, content_type=file.kind, charset="utf-8", headers=file.headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        caller = self._caller(request)
        self._calls.charge(caller)
        tenant = caller.tenant
        if self._viewers.total() >= MAX_VIEWERS or self._viewers[tenant] >= MAX_VIEWERS_OF_TENANT:
            raise ResourceExhausted(
                f"{MAX_VIEWERS} consoles are open at this gateway, or {MAX_VIEWERS_OF_TENANT} of this tenant",
                retry_after_s=RETRY_S,
            )
        self._viewers[tenant] += 1
        try:
            return await self._send_events(request)
        finally:
            self._viewers[tenant] -= 1
            if not self._viewers[tenant]:
                del self._viewers[tenant]

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        """Send snapshots until the client leaves, its key is withdrawn, or the gateway stops."""
        response = web.StreamResponse(headers=EVENT_STREAM)
        await response.prepare(request)
        snapshot = None
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not stopping.done():
                following = asyncio.create_task(self._snapshots.after(snapshot))
                try:
                    await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        break
                    snapshot = following.result()
                finally:
                    following.cancel()
                caller = self._caller(request)  # again: the file of tenants may have changed
                sees_all = self._tenants.is_operator(caller.tenant)
                await response.write(b"data: %b\n\n" % snapshot.json_for(caller.tenant, sees_all=sees_all))
        except LapsSdError:  # the page calls again, and gets the error as a status
            pass
        finally:
            stopping.cancel()
        await response.write_eof()
        return response

    async def _explain(self, request: web.Request) -> web.Response:
        caller = self._caller(request)
        answer = await self._calls.explain(
            request.match_info["id"], caller, of_any_tenant=self._tenants.is_operator(caller.tenant)
        )
        body = MessageToDict(
            answer.explanation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return web.json_response(body, headers={"Cache-Control": "no-store"})

    def _caller(self, request: web.Request) -> Caller:
        """Return the caller of a request for data. Raises Unauthenticated, InvalidArgument, PermissionDenied."""
        tenant = tenant_of(request, self._tenants)
        if tenant == ANONYMOUS:
            if not self._local_only:
                raise Unauthenticated("the console needs a key at a gateway that other machines can call")
            if not names_this_machine(request):
                raise PermissionDenied("without a key the console is served at localhost only")
        return Caller(tenant=tenant)


class _File:
    """A file of the console, with its headers."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.kind = KINDS[path.suffix]
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'
        self.headers = {
            "Cache-Control": "no-cache",  # the browser keeps it, and sends its tag each time
            "Content-Security-Policy": POLICY,
            "ETag": self.tag,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
