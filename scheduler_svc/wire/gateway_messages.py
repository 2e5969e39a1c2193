"""Messages of gateways after their hello, as the leader handles them."""

from __future__ import annotations

from dataclasses import dataclass

from laps_sd.v1 import gateway_link_pb2 as gateway_pb

GatewayMessage = gateway_pb.GatewayMessage
"""Message of a gateway after its hello; `from_gateway` reads it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that a gateway submits, not yet checked."""

    submission_id: int
    request_id: str
    attachment_id: str
    restores: bool
    """True if the request was accepted before, and the record may have lost it."""
    shown_ids: tuple[int, ...]
    """Outputs that a client has seen."""
    message: gateway_pb.Submit


@dataclass(frozen=True, slots=True)
class Attach:
    """A client that wants the outputs of a request from `from_token` on."""

    attach_id: int
    request_id: str
    tenant: str
    from_token: int
    attachment_id: str
    wants_submission: bool


@dataclass(frozen=True, slots=True)
class Detach:
    """A client that left."""

    attachment_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order of a tenant that its request ends."""

    cancel_id: int
    request_id: str
    tenant: str


def from_gateway(message: GatewayMessage) -> Submission | Attach | Detach | Cancel | None:
    """Return the content of a gateway's message; None for a kind that this release does not know."""
    match message.WhichOneof("message"):
        case "submit":
            return submission_of(message.submit)
        case "attach":
            attach = message.attach
            return Attach(
                attach_id=attach.attach_id,
                request_id=attach.request_id,
                tenant=attach.tenant,
                from_token=attach.from_token,
                attachment_id=attach.attachment_id,
                wants_submission=attach.wants_submission,
            )
        case "detach":
            return Detach(message.detach.attachment_id)
        case "cancel":
            cancel = message.cancel
            return Cancel(cancel.cancel_id, cancel.request_id, cancel.tenant)
    return None


def submission_of(submit: gateway_pb.Submit) -> Submission:
    """Return the content of a submission; its specification gets the traceparent, as the record keeps it."""
    if submit.traceparent:
        submit.specification.traceparent = submit.traceparent
    return Submission(
        submission_id=submit.submission_id,
        request_id=submit.request_id,
        attachment_id=submit.attachment_id,
        restores=submit.restores,
        shown_ids=tuple(submit.shown_ids),
        message=submit,
    )
