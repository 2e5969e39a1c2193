"""API keys: 256 random bits, of which a server keeps a digest only."""

from __future__ import annotations

import hashlib
import re
import secrets

__all__ = ["ANONYMOUS", "MAX_TENANT_CHARACTERS", "digest_of", "new_key", "tenant_name_problem"]

ANONYMOUS = "anonymous"
"""Tenant of calls without a key."""
MAX_TENANT_CHARACTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def tenant_name_problem(name: str) -> str:
    """Return what is wrong with a tenant's name, to follow the name in a sentence; empty if nothing is."""
    if _NAME.fullmatch(name) and len(name) <= MAX_TENANT_CHARACTERS:
        return ""
    return f"must be at most {MAX_TENANT_CHARACTERS} letters, digits and . _ -, and begin with a letter or a digit"


def new_key() -> str:
    """Return a new key for a user."""
    return "laps-sd-" + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return a key's digest for the file of tenants.

    One round of SHA-256 hides a key that cannot be guessed.
    """
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
