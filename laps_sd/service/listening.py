"""Addresses on which services listen, and which of them are of this machine."""

from __future__ import annotations

import socket
from ipaddress import ip_address

__all__ = ["EVERY_ADDRESS", "available_host", "is_loopback"]

EVERY_ADDRESS = "::"
"""Every address of this machine, of IPv6 and of IPv4."""
EVERY_IPV4_ADDRESS = "0.0.0.0"  # noqa: S104


def available_host(host: str) -> str:
    """Return the host on which to listen: every IPv4 address in place of every address, if the machine has no
    IPv6."""
    return EVERY_IPV4_ADDRESS if host == EVERY_ADDRESS and not socket.has_dualstack_ipv6() else host


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, is this machine itself."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
