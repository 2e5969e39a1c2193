"""The record: every accepted request, its committed tokens, its lease and its place in the queue, in Redis or
Valkey.
"""

from scheduler_svc.core.rank import MAX_LEVELS
from scheduler_svc.store.errors import (
    Fault,
    Fenced,
    RecordBehind,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from scheduler_svc.store.records import (
    Leader,
    LeaderEpoch,
    Limits,
    NewRequest,
    Shown,
    StoredRequest,
    SubmitResult,
    SubmitStatus,
    TransitionStatus,
)
from scheduler_svc.store.store import Batch, Pending, Store

__all__ = [
    "MAX_LEVELS",
    "Batch",
    "Fault",
    "Fenced",
    "Leader",
    "LeaderEpoch",
    "Limits",
    "NewRequest",
    "Pending",
    "RecordBehind",
    "SchemaMismatch",
    "Shown",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "StoredRequest",
    "SubmitResult",
    "SubmitStatus",
    "TransitionStatus",
]
