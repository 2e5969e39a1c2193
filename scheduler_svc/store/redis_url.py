"""Parser of `LAPS_SD_REDIS_URL`. Imports no client library: settings are checked where none is installed.

    redis://HOST:PORT/DB                               one server
    redis://HOST:PORT,HOST:PORT/DB                     the primary among them; nodes of a Redis Cluster
    redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB       sentinels, and the name under which they watch the primary
    unix://PATH                                        a socket file

`rediss` and `rediss+sentinel` mean TLS. `USER@` or `USER:PASSWORD@` may stand before the hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Parts of a URL."""

    url: str
    """URL for the client library: one host, no credentials."""
    addresses: tuple[Address, ...]
    """Addresses of servers, or of sentinels. Empty: a socket file."""
    sentinel_name: str = ""
    """Name of the primary at the sentinels; empty: `addresses` are servers."""
    username: str = ""
    password: str = ""

    @property
    def tls(self) -> bool:
        """Return True if servers and sentinels are reached with TLS."""
        return self.url.startswith("rediss")


def parse_redis_url(text: str) -> RedisUrl:
    """Return the parsed URL. Raises ValueError, whose text never holds the URL: it may hold a password."""
    scheme, separator, rest = text.partition("://")
    if scheme == "unix" and separator:
        credentials, _, path = rest.rpartition("@")
        username, _, password = credentials.partition(":")
        return RedisUrl(f"unix://{path}", (), username=unquote(username), password=unquote(password))
    if not separator or scheme not in SCHEMES:
        raise ValueError("unknown scheme")
    place, question, query = rest.partition("?")
    authority, _, path = place.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    scheme, _, by_sentinels = scheme.partition("+")
    addresses = tuple(
        _address(host, DEFAULT_SENTINEL_PORT if by_sentinels else DEFAULT_PORT) for host in hosts.split(",")
    )
    name, database = "", path
    if by_sentinels:
        name, _, database = path.partition("/")
        if not name:
            raise ValueError("a sentinel URL needs the name of the primary")
    if database and not database.isdecimal():
        raise ValueError("a database is a number")
    host, port = addresses[0]
    host = f"[{host}]" if ":" in host else host
    return RedisUrl(
        f"{scheme}://{host}:{port}/{database or 0}{question}{query}",
        addresses,
        sentinel_name=name,
        username=unquote(username),
        password=unquote(password),
    )


def _address(text: str, default_port: int) -> Address:
    if text.startswith("["):  # IPv6
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    host = host or "localhost"
    if not port:
        return host, default_port
    if not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError("a port is a number from 1 to 65535")
    return host, int(port)
