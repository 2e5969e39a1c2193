"""API keys: 256 random bits, of which a server keeps a digest only."""

from __future__ import annotations

import hashlib
import secrets

__all__ = ["digest_of", "new_key"]


def new_key() -> str:
    """Return a new key for a user."""
    return "laps-sd-" + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return a key's digest for the file of tenants.

    One round of SHA-256 hides a key that cannot be guessed.
    """
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
