"""How many messages does one gateway process carry, and what delay does it add? `laps-sd bench gateway`

A scheduler of this file (a process of its own) delivers tokens for many streams at a steady rate, about three
at a time, as a busy pool does: many requests in one message of the link. A real gateway turns them into text
and streams them to clients in this process, by gRPC or by server-sent events; they note arrival times, and
evaluate them after the run (`bench/_arrivals.py`). The delay of a delivery is the time from when the
scheduler hands it to its link until the client has it, both read from the machine's one monotonic clock; what
a client gets in one message because it was late counts for each delivery in it.

On a busy machine the delay depends mostly on the machine. The second figure is the CPU time of the gateway's
process: messages per second of CPU time, which is what one core could carry.

Goal: 6,000 messages per second of CPU time, and a p99 delay below 20 ms at that rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import uvloop

from bench._arrivals import Arrivals, GrpcArrivals, HttpArrivals
from bench._metrics import MetricsPage
from bench.report import about, command_line, finish, progress, quantile, table
from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.service.model_dir import demo_target_dir
from laps_sd.service.wire import server_options
from laps_sd.stack.ports import free_port
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import gateway_link_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb

GOAL_MESSAGES_PER_CPU_S = 6000.0
GOAL_P99_S = 0.020
TOKENS = 3
TICK_S = 0.004
WARM_UP = 10
"""Deliveries of each stream that are not counted."""


def arguments() -> argparse.Namespace:
    parser = command_line("gateway", __doc__)
    parser.add_argument("--streams", type=int, default=256, help="streams at once (default 256)")
    parser.add_argument("--rate", type=float, default=6000.0, help="deliveries per second (default 6000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run (default 10)")
    parser.add_argument("--protocol", choices=("grpc", "http", "both"), default="grpc")
    return parser.parse_args()


# -- the scheduler, in its own process ----------------------------------------------------------------------------------


class Source(gateway_link_pb2_grpc.GatewayLinkServicer):
    """Scheduler that accepts a number of requests, delivers to all of them at the rate, ends them, and
    records the send times.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._outbox: asyncio.Queue[link_pb2.GatewayLinkReply] = asyncio.Queue()
        self._ids: list[str] = []
        self._attachments: list[str] = []
        self.sent: dict[str, list[float]] = {}
        self.done = asyncio.Event()

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.GatewayMessage], context: Any
    ) -> AsyncIterator[link_pb2.GatewayLinkReply]:
        await anext(request_iterator)
        hello = link_pb2.SchedulerHello(
            shard="s0", protocol_version=PROTOCOL_VERSIONS[0], software_version="bench", pool="demo"
        )
        yield link_pb2.GatewayLinkReply(leader_epoch="1-bench", hello=hello)
        tasks = [asyncio.create_task(self._listen(request_iterator)), asyncio.create_task(self._beat())]
        try:
            while True:
                yield await self._outbox.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._send(heartbeat=link_pb2.Heartbeat(sent_ms=time.monotonic_ns() // 10**6))

    async def _listen(self, messages: AsyncIterator[link_pb2.GatewayMessage]) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "submit":
                submit = message.submit
                accepted = link_pb2.SubmitAccepted(request_id=submit.request_id)
                self._send(
                    submit_reply=link_pb2.SubmitReply(submission_id=submit.submission_id, accepted=accepted)
                )
                self._ids.append(submit.request_id)
                self._attachments.append(submit.attachment_id)
                if len(self._ids) == self._options.streams:
                    self._delivering = asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        ids = self._ids
        self.sent = {request_id: [] for request_id in ids}
        total = int(self._options.rate * self._options.seconds)
        began = time.monotonic()
        given = 0
        while given < total:
            due = min(total, int((time.monotonic() - began) * self._options.rate))
            plain = link_pb2.PlainDeliveries()
            for number in range(given, due):
                times = self.sent[ids[number % len(ids)]]
                first = TOKENS * len(times)
                plain.attachment_ids.append(self._attachments[number % len(ids)])
                plain.first_tokens.append(first)
                plain.token_counts.append(TOKENS)
                plain.token_ids.extend(300 + (first + place) % 500 for place in range(TOKENS))
                times.append(time.monotonic())
            if due > given:
                self._send(deliveries=link_pb2.Deliveries(plain=plain))
            given = due
            await asyncio.sleep(TICK_S)
        end = link_pb2.RequestEnd(kind=link_pb2.RequestEnd.KIND_LENGTH)
        ends = [
            link_pb2.Delivery(
                attachment_id=attachment_id, first_token=TOKENS * len(self.sent[request_id]), end=end
            )
            for request_id, attachment_id in zip(ids, self._attachments, strict=True)
        ]
        self._send(deliveries=link_pb2.Deliveries(deliveries=ends))
        self.done.set()

    def _send(self, **message: Any) -> None:
        self._outbox.put_nowait(link_pb2.GatewayLinkReply(leader_epoch="1-bench", **message))


async def be_source(pipe: Connection, options: argparse.Namespace) -> None:
    """Serve one run: send the port, and at the end the times at which deliveries were sent."""
    server = grpc.aio.server(options=server_options())
    source = Source(options)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(source, server)
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await source.done.wait()
    # In a thread, since the gateway must receive the ends before anybody reads this.
    await asyncio.to_thread(pipe.send, source.sent)
    await server.wait_for_termination()  # the parent process ends this one


def source_process(pipe: Connection, options: argparse.Namespace) -> None:
    uvloop.run(be_source(pipe, options))


# -- the clients --------------------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """Token counts that one client received, with their times."""

    request_id: str = ""
    messages: int = 0
    times: list[tuple[int, float]] = field(default_factory=list)


async def connect(address: str, arrivals: Arrivals) -> None:
    host, _, port = address.rpartition(":")
    await asyncio.get_running_loop().create_connection(lambda: arrivals, host, int(port))
    await arrivals.ended


async def read_grpc(address: str, streams: int) -> list[Heard]:
    path = "/laps_sd.v1.Inference/GenerateStream"
    arrivals = [
        GrpcArrivals(path, pb.GenerateRequest(text=f"request {number}").SerializeToString())
        for number in range(streams)
    ]
    await asyncio.gather(*(connect(address, each) for each in arrivals))
    clients = []
    for each in arrivals:
        clients.append(heard := Heard())
        for now, message in each.messages():
            event = pb.GenerateEvent.FromString(message)
            match event.WhichOneof("event"):
                case "accepted":
                    heard.request_id = event.accepted.request_id
                case "delta":
                    heard.messages += 1
                    heard.times.append((event.delta.cursor.next_token, now))
    return clients


async def read_http(address: str, streams: int) -> list[Heard]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    arrivals = []
    for number in range(streams):
        body = {"prompt": f"request {number}", "stream": True, "stream_options": options}
        arrivals.append(HttpArrivals("/v1/completions", json.dumps(body).encode()))
    await asyncio.gather(*(connect(address, each) for each in arrivals))
    clients = []
    for each in arrivals:
        headers, chunks = each.answer()
        clients.append(heard := Heard(headers["x-request-id"]))
        events = ((now, line) for now, chunk in chunks for line in chunk.splitlines())
        for now, line in events:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if chunk["choices"]:
                    # The chunk with the reason has no counterpart by gRPC, where the end is no delta.
                    heard.messages += chunk["choices"][0]["finish_reason"] is None
                    heard.times.append((chunk["usage"]["completion_tokens"], now))
    return clients


# -- a run --------------------------------------------------------------------------------------------------------------


def run(protocol: str, options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    source = spawn.Process(target=source_process, args=(theirs, options), daemon=True)
    source.start()
    theirs.close()
    ports = {name: free_port() for name in ("GRPC", "METRICS", "HTTP")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LAPS_SD_")}
    environment |= {f"LAPS_SD_{name}_PORT": str(port) for name, port in ports.items()}
    environment |= {
        "LAPS_SD_SCHEDULER_SEEDS": f"127.0.0.1:{pipe.recv()}",
        "LAPS_SD_TOKENIZER_DIR": str(demo_target_dir()),
        "LAPS_SD_LOG_LEVEL": "warning",
    }
    gateway = subprocess.Popen([sys.executable, "-m", "gateway"], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not is_serving(f"127.0.0.1:{ports['GRPC']}"):
            if time.monotonic() > deadline or gateway.poll() is not None:
                raise SystemExit("the gateway did not start")
            time.sleep(0.1)
        before = _cpu_s(ports["METRICS"])
        read, name = (read_grpc, "GRPC") if protocol == "grpc" else (read_http, "HTTP")
        heard = uvloop.run(read(f"127.0.0.1:{ports[name]}", options.streams))
        cpu_s = _cpu_s(ports["METRICS"]) - before
        sent = pipe.recv()
    finally:
        gateway.kill()
        gateway.wait()
        source.kill()
        source.join()
    return row(protocol, options, heard, sent, cpu_s)


def row(
    protocol: str, options: argparse.Namespace, heard: list[Heard], sent: dict[str, list[float]], cpu_s: float
) -> dict[str, Any]:
    """Return one line of the table."""
    delays = []
    for client in heard:
        at = 0
        for tokens, now in client.times:
            while TOKENS * (at + 1) <= tokens:
                if at >= WARM_UP:
                    delays.append(now - sent[client.request_id][at])
                at += 1
        assert at == len(sent[client.request_id]), "a delivery did not arrive"
    delays.sort()
    messages = sum(client.messages for client in heard)
    deliveries = sum(map(len, sent.values()))
    first = min(times[0] for times in sent.values())
    lasted_s = max(client.times[-1][1] for client in heard) - first
    return {
        "config": f"{protocol}, {options.streams} streams",
        "deliveries_per_s": deliveries / lasted_s,
        "messages_per_s": messages / lasted_s,
        "tokens_per_message": TOKENS * deliveries / messages,
        "delay_p50_s": quantile(delays, 0.5),
        "delay_p99_s": quantile(delays, 0.99),
        "gateway_cpu_share": cpu_s / lasted_s,
        "messages_per_cpu_s": messages / cpu_s,
        "deliveries_per_cpu_s": deliveries / cpu_s,
    }


def _cpu_s(port: int) -> float:
    page = MetricsPage(f"http://127.0.0.1:{port}/metrics")
    return page.total("process_cpu_seconds_total")


def main() -> int:
    options = arguments()
    rows = []
    for protocol in ("grpc", "http") if options.protocol == "both" else (options.protocol,):
        progress(
            f"{protocol}: {options.streams} streams, {options.rate:g} deliveries/s, {options.seconds:g} s"
        )
        rows.append(run(protocol, options))
    table("One gateway process", rows, width=150)
    met = all(
        each["deliveries_per_cpu_s"] >= GOAL_MESSAGES_PER_CPU_S and each["delay_p99_s"] < GOAL_P99_S
        for each in rows
    )
    summary = "; ".join(
        f"{each['config']}: {each['messages_per_cpu_s']:.0f} messages per CPU second at {each['tokens_per_message']:.1f} tokens, "
        f"p99 delay {each['delay_p99_s'] * 1000:.1f} ms"
        for each in rows
    )
    return finish(rows, json_file=options.json, summary=summary, met=met, about=about("gateway"))


if __name__ == "__main__":
    sys.exit(main())
