"""Certificates that are renewed while a service runs, and the time at which each expires.

    certificate = ServedCertificate(tls)                  # reads the files; StartupError if they cannot be used
    server.add_secure_port(address, certificate.grpc_credentials())
    expose_expiry("server", tls.cert)

A listener reads its files again when they have changed, at the next handshake. Connections that exist stay.
Files that do not go together (a renewal that is half written) change nothing, and are logged once. A dialler
reads its files for each connection, and does the same with files that are missing for a moment (`wire.Tls`).
"""

from __future__ import annotations

import calendar
import math
import ssl
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from laps_sd.errors import StartupError
from laps_sd.service import metrics
from laps_sd.service.log import get_logger
from laps_sd.service.wire import Tls

__all__ = ["EXPIRY", "ServedCertificate", "expires_at", "expose_expiry", "no_passphrase"]

log = get_logger(__name__)

EXPIRY = metrics.gauge(
    "laps_sd_certificate_expiry_timestamp_seconds",
    "Time at which the certificate in the file expires, in seconds since 1970, by what it is used for: server, "
    "link (presented to schedulers) or redis. NaN if the file cannot be read.",
    ["use"],
)


class _Files(NamedTuple):
    """Content of a listener's files; the context was made from the same files."""

    cert: bytes
    key: bytes
    ca: bytes | None
    context: ssl.SSLContext


class ServedCertificate:
    """The certificate of a listener, as its files are now. May be used from several threads."""

    def __init__(self, tls: Tls) -> None:
        """Read the files. Raises StartupError if they cannot be used."""
        assert tls.cert is not None and tls.key is not None, "a listener has a certificate"
        self._cert, self._key, self._ca = tls.cert, tls.key, tls.ca
        self._lock = threading.Lock()
        self._problem = ""
        try:
            self._state = self._stat()
            self._files = self._read()
        except OSError as error:  # ssl.SSLError too
            which = f"{error.filename}: " if error.filename else ""
            raise StartupError(
                f"The TLS files {tls.cert} and {tls.key} cannot be used: {which}{error.strerror or error}."
            ) from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for `add_secure_port`; with a CA, clients must present a certificate of it
        (mutual TLS)."""
        given: list[_Files] = [self.files()]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            files = self.files()
            if files is given[0]:
                return None  # nothing has changed
            given[0] = files
            return _configuration(files)

        demand = self._ca is not None
        # The stubs have a fetcher that always returns something; None means that nothing has changed.
        return grpc.dynamic_ssl_server_credentials(_configuration(given[0]), fetch, demand)  # type: ignore[arg-type]

    def ssl_context(self) -> ssl.SSLContext:
        """Return a context for a server of asyncio, with the same demands."""
        context = self.files().context

        def choose(connection: Any, name: str | None, own: ssl.SSLContext) -> None:
            connection.context = self.files().context

        context.sni_callback = choose
        return context

    def files(self) -> _Files:
        """Return the files that can be used last."""
        with self._lock:
            try:
                state = self._stat()
                if state != self._state:
                    files = self._read()
                    # Otherwise they changed during the read: the next call reads them again.
                    if self._stat() == state:
                        self._state, self._files, self._problem = state, files, ""
                        log.info(
                            "certificate renewed", cert=str(self._cert), expires_in_s=_left_s(files.cert)
                        )
            except OSError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    log.error(
                        "the TLS files cannot be used: the old ones stay",
                        cert=str(self._cert),
                        error=self._problem,
                    )
            return self._files

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        found = [path.stat() for path in (self._cert, self._key, self._ca) if path is not None]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _read(self) -> _Files:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._cert, self._key, no_passphrase)
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except OSError as error:
                raise OSError(f"{self._ca}: {error.strerror or error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        ca = None if self._ca is None else self._ca.read_bytes()
        return _Files(self._cert.read_bytes(), self._key.read_bytes(), ca, context)


def no_passphrase() -> str:
    """Refuse a key that needs a passphrase, for which OpenSSL would ask at the terminal and wait."""
    raise OSError("the key is encrypted, and a service has no passphrase for it")


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.ca)


def expose_expiry(use: str, cert: Path | None) -> None:
    """Have the metric read this file at each scrape. `None`: there is no certificate."""
    if cert is not None:
        EXPIRY.labels(use).set_function(lambda: _expiry_of(cert))


def _expiry_of(cert: Path) -> float:
    try:
        return expires_at(cert.read_bytes())
    except (OSError, ValueError):
        return math.nan


def _left_s(pem: bytes) -> float:
    try:
        return round(expires_at(pem) - time.time())
    except ValueError:
        return math.nan


def expires_at(pem: bytes) -> float:
    """Return the `notAfter` of the first certificate in a PEM file, in seconds since 1970.

    Raises ValueError if there is none. (RFC 5280, 4.1: the validity is the fourth field after an optional
    version. Python's `ssl` reads it only from a peer's verified certificate.)
    """
    text = pem.decode("ascii", "replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first, last = text.find(begin), text.find(end)
    if first < 0 or last < first:
        raise ValueError("there is no certificate in the file")
    der = ssl.PEM_cert_to_DER_cert(text[first : last + len(end)])
    try:
        at, _ = _enter(der, 0)  # Certificate
        at, _ = _enter(der, at)  # TBSCertificate
        if der[at] == _VERSION:
            at = _after(der, at)
        for _ in ("serial number", "signature", "issuer"):
            at = _after(der, at)
        at, _ = _enter(der, at)  # Validity
        at = _after(der, at)  # notBefore
        kind = der[at]
        begin_at, end_at = _enter(der, at)
        moment = der[begin_at:end_at].decode("ascii")
        if kind == _UTC_TIME:  # RFC 5280, 4.1.2.5.1: two digits, from 1950 to 2049
            moment = ("20" if moment < "5" else "19") + moment
        return calendar.timegm(time.strptime(moment, "%Y%m%d%H%M%SZ"))
    except IndexError:
        raise ValueError("the certificate is cut off") from None


_VERSION, _UTC_TIME = 0xA0, 0x17


def _enter(der: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the element at `at` begins and ends (X.690, 8.1.3)."""
    length = der[at + 1]
    if length < 0x80:
        return at + 2, at + 2 + length
    size = length & 0x7F
    length = int.from_bytes(der[at + 2 : at + 2 + size], "big")
    return at + 2 + size, at + 2 + size + length


def _after(der: bytes, at: int) -> int:
    return _enter(der, at)[1]
