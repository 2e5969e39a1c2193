"""Loads the transitions from `lua/`, one file each; `_common.lua` goes in front of every one of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from scheduler_svc.store.codec import Argument

MAX_ENTRIES = 256
"""Entries that one call handles: more would keep the server from others for too long."""
MAX_PROMPTS = 32
"""Those of a call that brings the prompts of requests."""


@dataclass(frozen=True, slots=True)
class Script:
    """One transition."""

    name: str
    source: str
    sha: str
    """Hash by which EVALSHA names the script."""


@dataclass(frozen=True, slots=True)
class Call:
    """One EVALSHA."""

    script: Script
    keys: list[str]
    arguments: list[Argument]


def _load(name: str) -> Script:
    folder = resources.files("scheduler_svc.store").joinpath("lua")
    source = "".join(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("_common", name))
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = _load("acquire")
RENEW = _load("renew")
RECLAIM = _load("reclaim")
RECLAIMED = _load("reclaimed")
RESIGN = _load("resign")
SUBMIT = _load("submit")
APPEND = _load("append")
FOLD = _load("fold")
CLEAR = _load("clear")
COMMIT = _load("commit")
FINISH = _load("finish")
PROMPT_LOGPROBS = _load("prompt_logprobs")
LEASE = _load("lease")
RELEASE = _load("release")
RESTORE = _load("restore")
SAVE_LEARNT = _load("save_learnt")
EXTEND = _load("extend")
WITHDRAW = _load("withdraw")
CLAIM = _load("claim")
UNCLAIM = _load("unclaim")

ALL = (
    ACQUIRE,
    RENEW,
    RECLAIM,
    RECLAIMED,
    RESIGN,
    SUBMIT,
    APPEND,
    FOLD,
    CLEAR,
    COMMIT,
    FINISH,
    PROMPT_LOGPROBS,
    LEASE,
    RELEASE,
    RESTORE,
    SAVE_LEARNT,
    EXTEND,
    WITHDRAW,
    CLAIM,
    UNCLAIM,
)
