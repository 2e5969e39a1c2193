"""A scripted scheduler: real gRPC, a record that survives its restarts, and no scheduling.

A test commits tokens by hand; every attachment gets them. Messages of the gateway are kept in a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from laps_sd.service.leader_link import COLUMNS_VERSION, PROTOCOL_VERSIONS
from laps_sd.service.wire import server_options
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, gateway_link_pb2_grpc, inference_pb2
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from tests.helpers import wait_until_async

Reply = link_pb2.GatewayLinkReply
Kind = link_pb2.RequestEnd.Kind


@dataclass
class Recorded:
    """One request on the record."""

    submit: link_pb2.Submit
    tokens: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: inference_pb2.PromptLogprobs | None = None
    end: link_pb2.RequestEnd | None = None


@dataclass
class Record:
    """State that the schedulers of one shard share."""

    requests: dict[str, Recorded] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass(eq=False)
class Connection:
    gateway_id: str
    outbox: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    attachments: dict[str, str] = field(default_factory=dict)  # attachment id -> request id


class FakeScheduler(gateway_link_pb2_grpc.GatewayLinkServicer, admin_pb2_grpc.AdminServicer):
    def __init__(
        self,
        record: Record | None = None,
        *,
        epoch: str = "1-a",
        shard: str = "s0",
        version: int = PROTOCOL_VERSIONS[0],
    ) -> None:
        self.record = record or Record()
        self.epoch = epoch
        self.shard = shard
        self.version = version
        self.heard: list[link_pb2.GatewayMessage] = []
        self.connections: list[Connection] = []
        self.port = 0
        self.hellos = 0
        # The script:
        self.leader: str | None = None  # an address: answers NOT_LEADER and names it
        self.answers_submits = True
        self.answers_attaches = True
        self.heartbeats = True
        self.refuse: link_pb2.SubmitRefused | None = None
        self.load: link_pb2.ShardLoad | None = None  # sent with every heartbeat
        self.length_key_digest = b""
        self.lease_s = 0.0
        self.claims: dict[tuple[str, str], str] = {}  # idempotency key -> shard; shards of one pool share it
        self.attach_results: list[int] = []  # for the next Attaches; then the record decides
        self.replay_chunk = 1_000_000
        self.queue: list[admin_pb2.QueueEntry] = []
        self.workers: list[admin_pb2.WorkerStatus] = []
        self.queue_limits: list[int] = []  # one of each ListQueue
        self.denies_surveys = False  # as a scheduler does whose roles allow gateways no ListQueue
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> FakeScheduler:
        self._server = grpc.aio.server(options=server_options())
        gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Break all connections, in the middle of any work."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    # ---- what a test does

    def commit(
        self,
        request_id: str,
        tokens: Sequence[int] = (),
        end: link_pb2.RequestEnd | int | None = None,
        *,
        deliver: bool = True,
    ) -> None:
        """Write tokens and an end to the record, and send them to all attachments."""
        recorded = self.record.requests[request_id]
        first = len(recorded.tokens)
        recorded.tokens.extend(tokens)
        if end is not None:
            recorded.end = end if isinstance(end, link_pb2.RequestEnd) else link_pb2.RequestEnd(kind=end)
        if not deliver:
            return
        for connection in self.connections:
            for attachment_id, attached_to in connection.attachments.items():
                if attached_to == request_id:
                    self._deliver(connection, attachment_id, recorded, first)

    def say(self, reply: Reply, *, epoch: str | None = None) -> None:
        """Send a reply to every gateway."""
        for connection in self.connections:
            copy = Reply()
            copy.CopyFrom(reply)
            copy.leader_epoch = self.epoch if epoch is None else epoch
            connection.outbox.put_nowait(copy)

    def all_heard(self, kind: str) -> list[Any]:
        return [getattr(message, kind) for message in self.heard if message.WhichOneof("message") == kind]

    async def wait_heard(self, kind: str, count: int = 1) -> Any:
        """Return the `count`-th message of a kind."""
        await wait_until_async(
            lambda: len(self.all_heard(kind)) >= count, description=f"{count} × {kind}", every_s=0.005
        )
        return self.all_heard(kind)[count - 1]

    async def submitted(self, count: int = 1) -> str:
        """Return the id of the `count`-th request on the record."""
        await wait_until_async(
            lambda: len(self.record.requests) >= count, description=f"{count} requests", every_s=0.005
        )
        return list(self.record.requests)[count - 1]

    async def connected(self) -> None:
        await wait_until_async(lambda: self.connections, description="a gateway's hello", every_s=0.005)

    # ---- the wire

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: Any
    ) -> AsyncIterator[Reply]:
        hello = await anext(request_iterator)
        assert hello.WhichOneof("message") == "hello"
        self.heard.append(hello)
        self.hellos += 1
        if self.leader is not None:
            yield Reply(not_leader=link_pb2.NotLeader(leader_address=self.leader))
            return
        connection = Connection(hello.hello.gateway_id)
        yield Reply(
            leader_epoch=self.epoch,
            hello=link_pb2.SchedulerHello(
                shard=self.shard,
                protocol_version=self.version,
                software_version="test",
                pool="demo",
                length_key_digest=self.length_key_digest,
                lease_s=self.lease_s,
            ),
        )
        self.connections.append(connection)
        listening = asyncio.create_task(self._listen(connection, request_iterator))
        try:
            while True:
                try:
                    async with asyncio.timeout(0.1):
                        reply = await connection.outbox.get()
                except TimeoutError:
                    if not self.heartbeats:
                        continue
                    reply = Reply(
                        leader_epoch=self.epoch, heartbeat=link_pb2.Heartbeat(sent_ms=1), load=self.load
                    )
                yield reply
        finally:
            listening.cancel()
            self.connections.remove(connection)

    async def _listen(self, connection: Connection, messages: AsyncIterator[link_pb2.GatewayMessage]) -> None:
        async for message in messages:
            self.heard.append(message)
            match message.WhichOneof("message"):
                case "submit":
                    self._on_submit(connection, message.submit)
                case "attach":
                    self._on_attach(connection, message.attach)
                case "detach":
                    connection.attachments.pop(message.detach.attachment_id, None)
                case "cancel":
                    self._on_cancel(connection, message.cancel)

    def _on_submit(self, connection: Connection, submit: link_pb2.Submit) -> None:
        if not self.answers_submits:
            return
        reply = link_pb2.SubmitReply(submission_id=submit.submission_id)
        key = (submit.tenant, submit.idempotency_key)
        existing = self.record.keys.get(key) if submit.idempotency_key else None
        if self.refuse is not None:
            reply.refused.CopyFrom(self.refuse)
        elif submit.idempotency_key and self.claims.setdefault(key, self.shard) != self.shard:
            reply.refused.reason = link_pb2.SubmitRefused.REASON_KEY_ELSEWHERE
            reply.refused.shard = self.claims[key]
        elif existing is not None and self.record.requests[existing].submit.body_hash != submit.body_hash:
            reply.refused.reason = link_pb2.SubmitRefused.REASON_KEY_CONFLICT
        else:
            request_id = existing or submit.request_id
            recorded = self.record.requests.setdefault(request_id, Recorded(submit, list(submit.shown_ids)))
            if submit.idempotency_key:
                self.record.keys[key] = request_id
            reply.accepted.request_id = request_id
            reply.accepted.attached_to_existing = existing is not None
            reply.accepted.seed = recorded.submit.specification.sampling.seed
            reply.accepted.prompt_tokens = len(recorded.submit.specification.prompt_ids)
        self._say(connection, Reply(submit_reply=reply))
        if reply.HasField("accepted"):
            connection.attachments[submit.attachment_id] = reply.accepted.request_id
            self._replay(connection, submit.attachment_id, recorded, 0)

    def _on_attach(self, connection: Connection, attach: link_pb2.Attach) -> None:
        if not self.answers_attaches:
            return
        reply = link_pb2.AttachReply(attach_id=attach.attach_id)
        recorded = self.record.requests.get(attach.request_id)
        if self.attach_results:
            reply.result = self.attach_results.pop(0)  # type: ignore[assignment]
        elif recorded is None or recorded.submit.tenant != attach.tenant:
            reply.result = link_pb2.AttachReply.RESULT_NOT_FOUND
        else:
            reply.result = link_pb2.AttachReply.RESULT_ATTACHED
            reply.prompt_tokens = len(recorded.submit.specification.prompt_ids)
            reply.seed = recorded.submit.specification.sampling.seed
            reply.model = recorded.submit.model
            reply.stop.extend(recorded.submit.specification.sampling.stop)
        self._say(connection, Reply(attach_reply=reply))
        if reply.result == link_pb2.AttachReply.RESULT_ATTACHED:
            assert recorded is not None
            connection.attachments[attach.attachment_id] = attach.request_id
            self._replay(connection, attach.attachment_id, recorded, attach.from_token)

    def _on_cancel(self, connection: Connection, cancel: link_pb2.CancelRequested) -> None:
        recorded = self.record.requests.get(cancel.request_id)
        reply = link_pb2.CancelReply(cancel_id=cancel.cancel_id)
        if recorded is not None and recorded.submit.tenant == cancel.tenant:
            reply.found = True
            reply.cancelled = recorded.end is None
        self._say(connection, Reply(cancel_reply=reply))
        if reply.cancelled:
            self.commit(cancel.request_id, (), Kind.KIND_CANCELLED)

    def _replay(self, connection: Connection, attachment_id: str, recorded: Recorded, first: int) -> None:
        while len(recorded.tokens) - first > self.replay_chunk:
            self._deliver(connection, attachment_id, recorded, first, first + self.replay_chunk)
            first += self.replay_chunk
        if first < len(recorded.tokens) or recorded.end is not None:
            self._deliver(connection, attachment_id, recorded, first)

    def _deliver(
        self,
        connection: Connection,
        attachment_id: str,
        recorded: Recorded,
        first: int,
        last: int | None = None,
    ) -> None:
        tokens = recorded.tokens[first:last]
        delivery = link_pb2.Delivery(
            request_id=recorded.submit.request_id,
            first_token=first,
            token_ids=tokens,
            logprobs=recorded.logprobs[first:last],
            attachment_id=attachment_id,
            end=recorded.end if last is None else None,
            prompt_logprobs=recorded.prompt_logprobs if first == 0 and tokens else None,
        )
        details = delivery.logprobs or delivery.HasField("end") or delivery.HasField("prompt_logprobs")
        if self.version < COLUMNS_VERSION or details:
            deliveries = link_pb2.Deliveries(deliveries=[delivery])
        else:
            plain = link_pb2.PlainDeliveries(
                attachment_ids=[attachment_id],
                first_tokens=[first],
                token_counts=[len(delivery.token_ids)],
                token_ids=delivery.token_ids,
            )
            deliveries = link_pb2.Deliveries(plain=plain)
        self._say(connection, Reply(deliveries=deliveries))

    def _say(self, connection: Connection, reply: Reply) -> None:
        reply.leader_epoch = self.epoch
        connection.outbox.put_nowait(reply)

    async def ExplainRequest(
        self, request: admin_pb2.AdminExplainRequest, context: Any
    ) -> inference_pb2.ExplainResponse:
        recorded = self.record.requests.get(request.request_id)
        if recorded is None or request.tenant not in ("", recorded.submit.tenant):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return inference_pb2.ExplainResponse(
            explanation=inference_pb2.Explanation(
                request_id=request.request_id, policy="fcfs", tenant=request.tenant
            )
        )

    async def ListQueue(
        self, request: admin_pb2.ListQueueRequest, context: Any
    ) -> admin_pb2.ListQueueResponse:
        self.queue_limits.append(request.limit)
        if self.denies_surveys:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this certificate may not act as operator")
        return admin_pb2.ListQueueResponse(
            entries=self.queue[: request.limit], total=len(self.queue), policy="laps-sd"
        )

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Any
    ) -> admin_pb2.ListWorkersResponse:
        return admin_pb2.ListWorkersResponse(workers=self.workers)
