"""Checks after a run: what is still held, the record compared with the clients, logs, processes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import signal
from pathlib import Path

import grpc.aio
import redis.asyncio as redis_client

from bench._clients import Outcome
from bench._faults.injector import FaultInjector
from bench._metrics import metric
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from worker_svc.runner.process import how_it_ended

RECORD_BYTES_PER_REQUEST = 2_000
RECORD_BYTES_PER_TOKEN = 9
"""Bounds of docs/guarantees.md."""
ENGINE_KILLED = f"the engine's process {how_it_ended(-signal.SIGKILL)}"
"""Part of the error of a worker whose engine was killed."""


async def holders(stack: LocalStack, injector: FaultInjector) -> list[str]:
    """Return the components that still hold something although everything has ended."""
    found: list[str] = []
    await injector.look()
    if not injector.state.leader:
        return ["nobody leads"]
    try:
        async with grpc.aio.insecure_channel(stack.address(injector.state.leader)) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            queue = await admin.ListQueue(admin_pb2.ListQueueRequest(limit=10), timeout=5.0)
            workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5.0)
    except grpc.aio.AioRpcError as error:
        return [f"{injector.state.leader} does not answer: {error.code().name}"]
    if queue.total:
        found.append(f"the queue: {queue.total} requests, {[entry.request_id for entry in queue.entries]}")
    found += [
        f"{worker.worker_name}: {worker.listed} listed, {worker.running} slots taken"
        for worker in workers.workers
        if worker.listed or worker.running
    ]
    known = {worker.worker_name for worker in workers.workers if worker.connected}
    found += [f"{name}: not connected" for name in injector.processes.workers() if name not in known]
    for name in injector.processes.workers():
        used = await asyncio.to_thread(metric, stack, name, "laps_sd_worker_slots_used")
        waiting = await asyncio.to_thread(metric, stack, name, "laps_sd_worker_unacknowledged_reports")
        if used or waiting:
            found.append(f"{name}: {used:g} slots used, {waiting:g} reports not acknowledged")
    blocks = {
        worker.worker_name: (worker.free_target_blocks, worker.target_blocks) for worker in workers.workers
    }
    found += [
        f"{name}: {free} of {all_} KV blocks free" for name, (free, all_) in blocks.items() if free != all_
    ]
    for name in injector.processes.gateways():
        streams = await asyncio.to_thread(metric, stack, name, "laps_sd_gateway_streams")
        if streams:
            found.append(f"{name}: {streams:g} streams open")
    return found


async def record_problems(
    stack: LocalStack, outcomes: list[Outcome], injector: FaultInjector, tokens: int
) -> list[str]:
    """Return the differences between the record and the outcomes at the clients."""
    found: list[str] = []
    loses = [(done.at_s, done.over_s or done.at_s) for done in injector.injected if done.loses]
    by_id = {outcome.request_id: outcome for outcome in outcomes if outcome.request_id}
    by_key: dict[str, list[str]] = collections.defaultdict(list)
    async with redis_client.Redis.from_url(
        stack.redis_url, decode_responses=True, encoding_errors="replace"
    ) as record:
        keys = sorted([key async for key in record.scan_iter(match="laps-sd:*", count=1000)])
        lasting = [key for key in keys if await record.ttl(key) == -1]
        if lasting:
            found.append(f"{len(lasting)} keys that never expire: {lasting[:10]}")
        requests = [key for key in keys if re.search(r":request:[^:]+$", key)]
        for key in requests:
            fields = await record.hgetall(key)
            if not fields:
                continue  # it ended so long ago that its key has expired since the scan
            request_id = key.rpartition(":")[2]
            outcome = by_id.get(request_id)
            if fields.get("state") != "ended":
                found.append(f"{request_id} has not ended in the record: {fields.get('state')}")
                continue
            if fields.get("idempotency_key"):
                by_key[fields["idempotency_key"]].append(request_id)
            if outcome is None or outcome.end is None or outcome.error:
                continue
            if int(fields["committed"]) != len(outcome.tokens):
                found.append(
                    f"{request_id}: {fields['committed']} tokens committed, {len(outcome.tokens)} shown"
                )
        for key, ids in by_key.items():
            if len(ids) > 1 and not loses:
                found.append(f"{len(ids)} requests ran under the idempotency key {key}: {ids}")
        info = await record.info("memory")
        allowed = 4 * 2**20 + len(requests) * RECORD_BYTES_PER_REQUEST + tokens * RECORD_BYTES_PER_TOKEN
        used = int(info["used_memory_dataset"])
        if used > allowed:
            found.append(f"the record holds {used} bytes of data, at most {allowed} were expected")
    return found


def log_problems(stack: LocalStack, injector: FaultInjector) -> list[str]:
    """Return the exceptions in the logs, without those of workers whose engine was killed."""
    found = []
    killed = {name for done in injector.injected if done.fault.kind == "kill engine" for name in done.victims}
    for name in sorted(stack.children):
        text = stack.log(name)
        for match in re.finditer(r"Traceback \(most recent call last\)", text):
            excerpt = text[max(0, match.start() - 300) : match.start() + 1800]
            if name in killed and ENGINE_KILLED in excerpt:
                continue
            found.append(f"{name} logged an exception:\n{excerpt}")
            break
    return found


def processes_with(mark: str) -> list[str]:
    """Return the processes that have this text in the environment that they began with."""
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():  # empty for a zombie
                left.append(f"{entry.name}: {(entry / 'cmdline').read_text()[:200]}")
    return left
