"""Cross-origin resource sharing (Fetch Standard, section 3.2): which web pages may read answers."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web

__all__ = ["Cors"]

MAX_AGE_S = 600
"""How long a browser may keep the answer to a preflight request."""
EXPOSED = "Retry-After, Retry-After-Ms, X-Request-Id"
MAX_HEADERS_CHARACTERS = 1024
METHODS = "GET, POST, OPTIONS"


class Cors:
    """Grants the origins of a setting access; credentials of browsers (cookies) are never allowed."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: "https://app.example" for instance; "*" grants all."""
        self._origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a preflight request; None if this is none, or not granted."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if not self._granted(request):
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if len(wanted) <= MAX_HEADERS_CHARACTERS and wanted.isascii() and wanted.isprintable():
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def grant(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let a page read an answer. A signal of aiohttp: before headers are sent."""
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        if origin := self._granted(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _granted(self, request: web.Request) -> str:
        """Return the value of Access-Control-Allow-Origin; empty: not granted."""
        origin = request.headers.get("Origin", "")
        if not origin:
            return ""
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else ""
