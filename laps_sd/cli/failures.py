"""Failed calls in words for people, with what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from laps_sd.errors import LapsSdError, describe

__all__ = ["with_next_step", "within"]


def with_next_step(error: grpc.RpcError | LapsSdError) -> str:
    """Return what failed and, if the call reached the wrong server or none, what to do about it."""
    sentence = describe(error)
    if notes := getattr(error, "__notes__", ()):
        return f"{sentence}. {' '.join(notes)}"
    words = sentence.lower()
    if "handshake" in words or "ssl_error" in words:
        return (
            f"the TLS handshake at the address failed ({sentence}). If the server speaks plain text, leave out grpcs:// "
            "and --tls-ca, and unset LAPS_SD_TLS_CA or LAPS_SD_LINK_TLS_CA. --tls-ca names the CA of a private "
            "certificate."
        )
    if "hostname verification" in words:
        return f"the certificate of the server at the address is for another name ({sentence}): --tls-name gives it."
    if "socket closed" in words and "failed to connect" in words:
        return (
            f"the server at the address closed the connection ({sentence}). Does it need TLS (grpcs://), or a client "
            "certificate (--tls-cert)?"
        )
    if "failed parsing http/2" in words:
        return f"the server at the address does not speak gRPC ({sentence}). Is it an HTTP or metrics port?"
    if "failed to connect" in words:
        return (
            f"no server answers at the address ({sentence}). Is the system running? `laps-sd up` starts it."
        )
    code = _code_of(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the server did not answer in time ({sentence}). Its log shows what it waits for."
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{sentence}. --api-key or LAPS_SD_API_KEY gives the key to this command."
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the server at the address does not serve this call ({sentence}). A gateway (--url, usually port "
            "50051) serves generate, chat and explain; a scheduler (--scheduler, usually port 50052) queue, "
            "workers and drain."
        )
    return sentence


def _code_of(error: grpc.RpcError | LapsSdError) -> grpc.StatusCode | None:
    if isinstance(error, LapsSdError):
        return error.code
    return error.code() if isinstance(error, grpc.Call) else None


@contextmanager
def within(timeout_s: float | None) -> Iterator[None]:
    """Add a note to the error of a call whose deadline, set by --timeout, has passed."""
    try:
        yield
    except (grpc.RpcError, LapsSdError) as error:
        if timeout_s is not None and _code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
            error.add_note(
                f"The deadline was --timeout {timeout_s:g} (seconds): give more, or --time-limit instead, "
                "which ends the text in time and counts as success."
            )
        raise
