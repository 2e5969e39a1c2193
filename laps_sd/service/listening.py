"""Addresses on which services listen."""

from __future__ import annotations

import socket

__all__ = ["EVERY_ADDRESS", "available_host"]

EVERY_ADDRESS = "::"
"""Every address of this machine, of IPv6 and of IPv4."""
EVERY_IPV4_ADDRESS = "0.0.0.0"  # noqa: S104


def available_host(host: str) -> str:
    """Return the host on which to listen: every IPv4 address in place of every address, if the machine has no
    IPv6."""
    return EVERY_IPV4_ADDRESS if host == EVERY_ADDRESS and not socket.has_dualstack_ipv6() else host
