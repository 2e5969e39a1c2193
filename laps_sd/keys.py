"""API keys: 256 bits of chance, of which a server keeps a digest only."""

from __future__ import annotations

import hashlib
import secrets

__all__ = ["digest_of", "new_key"]


def new_key() -> str:
    """A key to give away."""
    return "laps-sd-" + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What a file of tenants holds of a key. One round of SHA-256 hides what nobody can guess."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
