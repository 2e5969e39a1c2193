"""The tenants of calls and their limits. Only this module decides on them, for every protocol.

The file of tenants (`tenant_file.py`) names them. Limits hold per gateway: no gateway knows the usage at
another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from gateway import metrics
from gateway.settings import GatewaySettings
from gateway.tenant_file import KeyFile, Quota, TenantFileError
from laps_sd.errors import (
    InvalidArgument,
    LapsSdError,
    PermissionDenied,
    ResourceExhausted,
    StartupError,
    Unauthenticated,
)
from laps_sd.service.keys import ANONYMOUS, MAX_TENANT_CHARACTERS, digest_of
from laps_sd.service.log import get_logger
from laps_sd.service.retry_times import RetryTimes, StreamRetryTimes

__all__ = ["FAIRNESS_KEY", "TENANT_KEY", "Tenants"]

log = get_logger(__name__)

OTHERS = "others"
TENANT_KEY = "laps-sd-tenant"
FAIRNESS_KEY = "x-llm-d-inference-fairness-id"
IDENTITY = ("authorization", TENANT_KEY, FAIRNESS_KEY)
MAX_KEY_CHARACTERS = 256
CALLS_PER_REQUEST = 10
"""Calls that make no request (Cancel, Resume, Explain, Tokenize, Detokenize) a tenant may make for each
request that it may make. They have a bucket of their own: a tenant that has used up its requests can still
cancel all of them. Our choice."""
LOOK_AGAIN_S = 5.0


class _Bucket:
    """A token bucket of the calls that a tenant may make: it fills at a rate up to a burst."""

    def __init__(self) -> None:
        self._allowance: float | None = None
        """Calls that may come at once; None: full."""
        self._counted_at = 0.0
        self._refused = RetryTimes()

    def take(self, count: int, full: float, per_s: float, now: float) -> float:
        """Take `count` calls; return 0, or the seconds after which they may be tried again. A full bucket may
        be emptied by more calls than the burst."""
        allowance = full if self._allowance is None else self._allowance
        allowance = min(full, allowance + (now - self._counted_at) * per_s)
        self._allowance, self._counted_at = allowance, now
        wanted = min(count, full)
        if wanted - allowance > 1e-9:
            return self._refused.next_s(now, (wanted - allowance) / per_s, wanted / per_s)
        self._allowance = allowance - count
        return 0.0


class _Account:
    """The present usage of a tenant."""

    def __init__(self) -> None:
        self.open = 0
        self.requests = _Bucket()
        self.calls = _Bucket()
        self.refused = StreamRetryTimes()
        """Retry times of calls refused by the tenant's limit of open streams."""


class Tenants:
    """The tenants of the file and their usage. Reads the headers of HTTP and the metadata of gRPC alike."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file of tenants, if there is one. `clock` returns seconds. Raises StartupError if the file
        cannot be used."""
        self._clock = clock
        self._trust_metadata = settings.trust_tenant_metadata
        self._anonymous = settings.allows_anonymous
        self._path = settings.api_keys_file
        self._single = settings.local_only and self._path is None and not self._trust_metadata
        """True if all callers are on this machine, and one tenant."""
        self.for_this_machine = self._single and settings.anonymous == "auto"
        """True if only programs of this machine are meant to call, so that pages in its browsers are refused."""
        self._file = KeyFile({}, {})
        self._accounts: dict[str, _Account] = {}
        self._seen = self._stamp()
        if self._path is not None:
            try:
                self._file = KeyFile.read(self._path)
            except TenantFileError as error:
                raise StartupError(f"LAPS_SD_API_KEYS_FILE: {error}.") from error

    def of(self, headers: Iterable[tuple[str, str]]) -> str:
        """Return the tenant of a call, from its headers as received. Raises Unauthenticated,
        InvalidArgument."""
        try:
            return self._of(_once(headers))
        except LapsSdError as error:
            metrics.REFUSED.labels(error.code.name).inc()
            raise

    def _of(self, headers: Mapping[str, str]) -> str:
        given = headers.get("authorization", "")
        if given and self._path is not None:  # without a keys file the header is for another server
            return self._by_key(given)
        if self._trust_metadata:
            for key in (TENANT_KEY, FAIRNESS_KEY):
                tenant = headers.get(key, "")
                if len(tenant) > MAX_TENANT_CHARACTERS:
                    raise InvalidArgument(
                        key, f"must be at most {MAX_TENANT_CHARACTERS} characters, got {len(tenant)}"
                    )
                # Lone surrogates, which represent bytes that are not text, are not printable either.
                if not tenant.isprintable():
                    raise InvalidArgument(key, "must hold printable characters only")
                if "," in tenant:  # a proxy joins several headers of one name with commas, see `_once`
                    raise InvalidArgument(key, "must be one name, without a comma")
                if tenant:
                    return tenant
        if not self._anonymous:
            raise Unauthenticated("a key is needed: send Authorization: Bearer KEY")
        return ANONYMOUS

    def _by_key(self, given: str) -> str:
        scheme, _, key = given.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise Unauthenticated("the authorization must be: Bearer KEY")
        # The key is looked up by its digest: the time that takes reveals nothing about a key. Bytes that are
        # not ASCII are not a key.
        tenant = self._file.tenants.get(digest_of(key)) if key.isascii() else None
        if tenant is None:
            raise Unauthenticated("the API key is not known here")
        return tenant

    def is_operator(self, tenant: str) -> bool:
        """Return whether a tenant may see the requests of all tenants, and the workers."""
        return self._single or tenant in self._file.operators

    def label(self, tenant: str) -> str:
        """Return the tenant as a metric's label: only tenants named in the file have their own label, which
        bounds the number of labels."""
        return tenant if tenant == ANONYMOUS or tenant in self._file.quotas else OTHERS

    def check_priority(self, tenant: str, priority: int) -> None:
        """Raise PermissionDenied for a priority above the tenant's highest."""
        most = self._quota(tenant).max_priority
        if most is not None and priority > most:
            raise PermissionDenied(f"priority must be at most {most} for tenant {tenant!r}, got {priority}")

    @contextmanager
    def admitted(self, tenant: str, count: int, *, new: bool) -> Iterator[None]:
        """Allow `count` streams to be open inside the context. Streams with `new` are charged to the tenant's
        rate.

        Raises ResourceExhausted; InvalidArgument for more than the tenant may ever have open.
        """
        quota = self._quota(tenant)
        began = self._clock()
        account = self._accounts.setdefault(tenant, _Account())
        most = quota.concurrent_requests
        if most is not None and count > most:
            raise InvalidArgument(
                "n", f"must be at most {most} outputs of one call for tenant {tenant!r}, got {count}"
            )
        if most is not None and account.open + count > most:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {account.open} requests open at this gateway, and may have {most}",
                retry_after_s=account.refused.next_s(began, count, most),
            )
        if new and quota.requests_per_minute is not None:
            wait_s = account.requests.take(count, quota.burst, quota.requests_per_minute / 60, began)
            if wait_s:
                raise ResourceExhausted(
                    f"tenant {tenant!r} may send {quota.requests_per_minute:g} requests a minute to this gateway",
                    retry_after_s=wait_s,
                )
        account.open += count
        try:
            yield
        finally:
            account.open -= count
            account.refused.closed(self._clock() - began)
            if not account.open and tenant not in self._file.quotas:
                self._accounts.pop(tenant, None)

    def charge_call(self, tenant: str) -> None:
        """Charge a call that makes no request. Raises ResourceExhausted."""
        quota = self._quota(tenant)
        if quota.requests_per_minute is None:
            return
        account = self._accounts.setdefault(tenant, _Account())
        per_minute = CALLS_PER_REQUEST * quota.requests_per_minute
        wait_s = account.calls.take(1, CALLS_PER_REQUEST * quota.burst, per_minute / 60, self._clock())
        if wait_s:
            raise ResourceExhausted(
                f"tenant {tenant!r} may make {per_minute:g} calls a minute to this gateway that make no request"
                " (Cancel, Resume, Explain, Tokenize, Detokenize)",
                retry_after_s=wait_s,
            )

    def _quota(self, tenant: str) -> Quota:
        return self._file.quotas.get(tenant, Quota())

    # ---- changes of the file

    async def watch(self) -> None:
        """Apply changes of the file until cancelled; an unusable file changes nothing."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            await asyncio.to_thread(self.maybe_reload)

    def maybe_reload(self) -> bool:
        """Read the file again if it has changed; return whether the new content is in force."""
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._file = KeyFile.read(self._path)
        except TenantFileError as error:
            log.error("tenants unchanged", reason=str(error))
            return False
        log.info("tenants read", tenants=len(self._file.quotas), keys=len(self._file.tenants))
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return values that change with the file, also if Kubernetes replaces a secret by changing the
        symbolic links in front of it, if a copy has the time of its original, or if only permissions
        change."""
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns, status.st_size


def _once(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers that identify a caller. Raises InvalidArgument for a header that was sent twice: if
    a proxy appended its own header to the client's, and the gateway used the client's, a client could choose
    its tenant."""
    found: dict[str, str] = {}
    for given, value in headers:
        name = given.lower()
        if name in IDENTITY:
            if name in found:
                raise InvalidArgument(name, "must be sent once at most, got it twice")
            found[name] = value
    return found
