"""Roles of clients on the scheduler's port, by the names in the client's certificate.

    LAPS_SD_CLIENT_ROLES=gateway=gateway.prod,worker=*.worker.prod,operator=spiffe://prod/operator

A name is a DNS name or a URI among the subject alternative names (RFC 5280, section 4.2.1.6), as the gRPC
library has verified them. `*.` at the front matches one label (RFC 6125, section 6.4.3). The common name
counts for nothing: CAs hand it out unchecked.

Every method needs a role unless it is listed as open to every client with a certificate of the CA; a method
that is not listed at all is open to no client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from laps_sd.errors import PermissionDenied
from laps_sd.service.log import get_logger

__all__ = ["ROLES", "ClientRoles", "Role", "roles_of_method"]

log = get_logger(__name__)

Role: TypeAlias = Literal["gateway", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

METHODS: tuple[tuple[str, frozenset[Role] | None], ...] = (
    ("/laps_sd.v1.GatewayLink/", frozenset({"gateway"})),
    ("/laps_sd.v1.WorkerLink/", frozenset({"worker"})),
    # What a gateway's console shows; a gateway may read and cancel any tenant's requests already.
    ("/laps_sd.v1.Admin/ExplainRequest", frozenset({"gateway", "operator"})),
    ("/laps_sd.v1.Admin/ListQueue", frozenset({"gateway", "operator"})),
    ("/laps_sd.v1.Admin/ListWorkers", frozenset({"gateway", "operator"})),
    ("/laps_sd.v1.Admin/", frozenset({"operator"})),
    # These only read, and return nothing of a request: the amount of work, the health of the process, the
    # list of methods.
    ("/externalscaler.ExternalScaler/", None),
    ("/grpc.health.v1.Health/", None),
    ("/grpc.reflection.", None),
)
"""Roles by prefix of the method; the first prefix that fits decides. None: no role is needed."""

LABEL = r"[A-Za-z0-9_-]+"
DNS_NAME = re.compile(rf"(?:\*\.)?{LABEL}(?:\.{LABEL})*", re.ASCII)
URI = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+", re.ASCII)
MAX_SHOWN = 5


def roles_of_method(method: str) -> frozenset[Role] | None:
    """Return the roles that may call the method; None: no role is needed."""
    return next((roles for prefix, roles in METHODS if method.startswith(prefix)), frozenset())


class ClientRoles:
    """Parsed value of `LAPS_SD_CLIENT_ROLES`. Without an entry no role is needed for anything."""

    def __init__(self, given: Sequence[str]) -> None:
        """Parse the entries. Raises ValueError, with the end of a sentence."""
        self._names: dict[Role, list[Callable[[str], object]]] = {role: [] for role in ROLES}
        for entry in given:
            wanted, separator, name = entry.partition("=")
            role = next((role for role in ROLES if role == wanted), None)
            if not separator or role is None:
                raise ValueError(f"must be role=name with one of {', '.join(ROLES)}, got {entry[:80]!r}")
            self._names[role].append(_pattern(name))
        needed: tuple[Role, ...] = ("gateway", "worker") if given else ()
        for role in needed:
            if not self._names[role]:
                raise ValueError(f"names no {role}: none could connect")
        self._checks = bool(given)

    def check(self, method: str, context: Any) -> None:
        """Raise PermissionDenied unless the client of this call may make it."""
        needed = roles_of_method(method) if self._checks else None
        if needed is None:
            return
        names = names_of(context.auth_context())
        if not needed & self.of(names):
            shown = ", ".join(names[:MAX_SHOWN]) or "none"
            wanted = " or ".join(sorted(needed)) or "anybody"
            log.warning("call denied", method=method, names=shown)
            raise PermissionDenied(
                f"this certificate may not act as {wanted}: LAPS_SD_CLIENT_ROLES of the scheduler gives that role to "
                f"none of its DNS names and URIs ({shown})"
            )

    def of(self, names: Iterable[str]) -> set[Role]:
        """Return the roles of a client with these names."""
        names = list(names)
        return {
            role for role, fits in self._names.items() if any(fit(name) for fit in fits for name in names)
        }


def names_of(auth: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Return the DNS names and URIs of a verified certificate, from gRPC's properties of the peer; none for
    plain text.
    """
    found = [*auth.get("peer_dns", ()), *auth.get("peer_uri", ())]
    return [name.decode("ascii", "replace") for name in found]


def _pattern(name: str) -> Callable[[str], object]:
    if URI.fullmatch(name):
        return name.__eq__  # a URI is compared as it is written (SPIFFE ID, section 2)
    if not DNS_NAME.fullmatch(name):
        raise ValueError(f"must give a DNS name, with *. for one label, or a URI, got {name[:80]!r}")
    first, rest = (LABEL, name[1:]) if name.startswith("*.") else ("", name)
    return re.compile(first + re.escape(rest), re.ASCII | re.IGNORECASE).fullmatch
