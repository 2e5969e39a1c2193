"""Opens the record of a shard, as settings name it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from laps_sd.service.certificates import no_passphrase
from laps_sd.service.config import ConfigError
from scheduler_svc.record_settings import RecordSettings
from scheduler_svc.store.servers import RedisTls, SentinelUser
from scheduler_svc.store.store import Store


def open_record(settings: RecordSettings, **options: Any) -> Store:
    """Return the record, which connects when first used. `options`: further ones of `Store`.

    Raises ConfigError for a URL with options that the client library does not have, and for a certificate and key
    that cannot be used.
    """
    if settings.redis_tls_cert is not None:
        _check_certificate(settings.redis_tls_cert, settings.redis_tls_key)
    sentinel_user = None
    if settings.redis_sentinel_password_file is not None:
        sentinel_user = SentinelUser(
            username=settings.redis_sentinel_user, password_file=settings.redis_sentinel_password_file
        )
    try:
        return Store(
            settings.redis_url,
            settings.shard,
            tls=RedisTls(ca=settings.redis_tls_ca, cert=settings.redis_tls_cert, key=settings.redis_tls_key),
            password_file=settings.redis_password_file,
            sentinel_user=sentinel_user,
            **options,
        )
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError([f"LAPS_SD_REDIS_URL has an option that cannot be used: {reason}."]) from None


def _check_certificate(cert: Path, key: Path | None) -> None:
    try:
        ssl.create_default_context().load_cert_chain(cert, key, no_passphrase)
    except OSError as error:
        raise ConfigError(
            [f"LAPS_SD_REDIS_TLS_CERT and LAPS_SD_REDIS_TLS_KEY cannot be used: {error.strerror or error}."]
        ) from None
