"""Settings that lead to the record of a shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from laps_sd.contract.shard_names import SHARD_NAME, SHARD_NAME_RULE
from laps_sd.service.config import Settings, field, without_password
from scheduler_svc.store.redis_url import parse_redis_url


@dataclass(frozen=True, kw_only=True)
class RecordSettings(Settings):
    """The server of the record, and the shard."""

    GROUPS: ClassVar[Mapping[str, str]] = {"redis_url": "Record"}

    redis_url: str = field(
        "redis://127.0.0.1:6379/0",
        help="Server of the record (Redis 7.0 or newer, or Valkey): redis://HOST:PORT[,HOST:PORT …]/DB, also "
        "nodes of a cluster; redis+sentinel://HOST:PORT[,…]/NAME/DB; rediss and rediss+sentinel with TLS;"
        " unix://PATH.",
    )
    redis_password_file: Path | None = field(
        None, help="File with the password of the user in LAPS_SD_REDIS_URL; read for each connection."
    )
    redis_sentinel_user: str = field("", help="User name for the sentinels; empty: their default user.")
    redis_sentinel_password_file: Path | None = field(
        None,
        help="File with the password for the sentinels; read for each query. None: they require no password.",
    )
    redis_tls_ca: Path | None = field(
        None, help="CA file that verifies the Redis server, and sentinels; none: the system's roots."
    )
    redis_tls_cert: Path | None = field(
        None, help="Certificate that the scheduler presents to Redis (mutual TLS)."
    )
    redis_tls_key: Path | None = field(None, help="Key of LAPS_SD_REDIS_TLS_CERT.")
    shard: str = field(
        "s0", help="The shard of which this process is a scheduler; part of every key and request id."
    )

    def problems(self) -> Iterator[str]:
        """Yield the problems that the check of a single field cannot find."""
        yield from super().problems()
        yield from self._redis_problems()
        yield from name_problems("LAPS_SD_SHARD", self.shard)

    def _redis_problems(self) -> Iterator[str]:
        try:
            url = parse_redis_url(self.redis_url)
        except ValueError as error:
            yield (
                "LAPS_SD_REDIS_URL must be redis://HOST:PORT/DB, rediss://… (TLS) or unix://PATH, "
                f"got {without_password(self.redis_url)!r}: {error}."
            )
            return
        if self.redis_password_file is not None and url.password:
            yield "LAPS_SD_REDIS_URL holds a password and LAPS_SD_REDIS_PASSWORD_FILE names one: give one of them."
        if (self.redis_tls_cert is None) != (self.redis_tls_key is None):
            yield "LAPS_SD_REDIS_TLS_CERT and LAPS_SD_REDIS_TLS_KEY must be set together."
        if not url.tls and (self.redis_tls_ca or self.redis_tls_cert):
            yield "LAPS_SD_REDIS_TLS_CA and LAPS_SD_REDIS_TLS_CERT need a LAPS_SD_REDIS_URL that begins with rediss."
        if self.redis_sentinel_password_file is not None and not url.sentinel_name:
            yield (
                "LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE needs a LAPS_SD_REDIS_URL that begins with redis+sentinel or "
                "rediss+sentinel."
            )
        if self.redis_sentinel_user and self.redis_sentinel_password_file is None:
            yield "LAPS_SD_REDIS_SENTINEL_USER needs LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE."
        for name in (
            "redis_password_file",
            "redis_sentinel_password_file",
            "redis_tls_ca",
            "redis_tls_cert",
            "redis_tls_key",
        ):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                yield f"LAPS_SD_{name.upper()} must name a file; {path} is not a file."


def name_problems(variable: str, name: str) -> Iterator[str]:
    """Yield what is wrong with the name of a shard or pool."""
    if not SHARD_NAME.fullmatch(name):
        yield f"{variable} must be {SHARD_NAME_RULE}, got {name!r}."
