"""Opens the record of a shard, as settings name it."""

from __future__ import annotations

from typing import Any

from scheduler_svc.record_settings import RecordSettings
from scheduler_svc.store.servers import RedisTls, SentinelUser
from scheduler_svc.store.store import Store


def open_record(settings: RecordSettings, **options: Any) -> Store:
    """Return the record, which connects when first used. `options`: further ones of `Store`."""
    sentinel_user = None
    if settings.redis_sentinel_password_file is not None:
        sentinel_user = SentinelUser(
            username=settings.redis_sentinel_user, password_file=settings.redis_sentinel_password_file
        )
    return Store(
        settings.redis_url,
        settings.shard,
        tls=RedisTls(ca=settings.redis_tls_ca, cert=settings.redis_tls_cert, key=settings.redis_tls_key),
        password_file=settings.redis_password_file,
        sentinel_user=sentinel_user,
        **options,
    )
