"""One turn of the operator: its reads, actions and reports. Kubernetes is a memory here; test_cluster.py has
a real one.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

pytest.importorskip("kopf", reason="make setup")

from kubernetes_asyncio.client.exceptions import ApiException
from laps_sd_operator import __main__ as operator
from laps_sd_operator import objects, scheduler
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.reconcile import Worker
from structlog.testing import capture_logs

from laps_sd.service.log import get_logger
from tests.helpers import wait_until_async

POOL: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "models", "uid": "u-1", "generation": 2},
    "spec": {
        "replicas": 2,
        "scheduler": "127.0.0.1:1",
        "template": {"spec": {"containers": [{"name": "worker", "image": "w"}]}},
    },
}
NOBODY = "no scheduler answers: 127.0.0.1:1"


class Memory(operator.Kubernetes):
    """A Kubernetes that keeps the written objects. `refuses`: the answer to every write of the Deployment."""

    def __init__(
        self,
        pool: dict[str, Any] | None,
        deployment: dict[str, Any] | None = None,
        refuses: ApiException | None = None,
        pods: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._pool, self._deployment, self._refuses, self._pods = pool, deployment, refuses, list(pods)
        self.written: list[Any] = []
        self.told: list[dict[str, Any]] = []

    async def pool(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._pool)

    async def deployment(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._deployment)

    async def pods(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self._pods)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        (found,) = (pod for pod in self._pods if pod["metadata"]["name"] == name)
        found["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])

    async def create(self, deployment: dict[str, Any]) -> None:
        await self.patch_deployment([deployment])

    async def patch_deployment(self, operations: list[dict[str, Any]]) -> None:
        if self._refuses is not None:
            raise self._refuses
        self.written.append(operations)

    async def tell(self, status: dict[str, Any]) -> None:
        self.told.append(status)


async def turn(memory: Memory) -> bool:
    return await operator.turn(memory, None, get_logger("test"))


def refusal(status: int, **body: Any) -> ApiException:
    error = ApiException(status=status, reason="because")
    error.body = json.dumps(body)
    return error


async def test_a_new_pool_gets_a_deployment_even_while_no_scheduler_answers() -> None:
    memory = Memory(POOL)

    assert await turn(memory)

    ((made,),) = memory.written
    assert made["spec"]["replicas"] == 2
    (status,) = memory.told
    assert status["observedGeneration"] == 2
    assert status["problem"].startswith(NOBODY)


async def test_what_is_told_already_is_not_told_again() -> None:
    first = Memory(POOL)
    await turn(first)
    told = {name: value for name, value in first.told[0].items() if value is not None}

    again = Memory({**POOL, "status": told}, objects.deployment_of(POOL, 2))
    await turn(again)

    assert (again.written, again.told) == ([], [])


async def test_a_pool_that_is_gone_ends_its_turns_and_one_that_is_going_gets_nothing() -> None:
    going = Memory({**POOL, "metadata": {**POOL["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})

    assert not await turn(Memory(None))
    assert await turn(going), "it may have something to finish: what it owns goes first"
    assert (going.written, going.told) == ([], [])


async def test_a_deployment_of_somebody_else_is_left_alone_and_told() -> None:
    other = objects.deployment_of({**POOL, "metadata": {**POOL["metadata"], "uid": "u-0"}}, 9)
    memory = Memory(POOL, other)

    await turn(memory)

    assert memory.written == []
    assert memory.told[0]["problem"] == "there is a Deployment p that is not this pool's"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            refusal(
                422, message="spec.template.spec.containers[0].image: Required", details={"causes": [{}]}
            ),
            "spec.template.spec.containers[0].image: Required",
        ),
        (refusal(403, message="exceeded quota"), "exceeded quota"),
        (ApiException(status=500, reason="because"), "Kubernetes answers 500: because"),
        (refusal(422, message="the server rejected our request", details={}), NOBODY),
        (refusal(409, message="already exists"), NOBODY),
        (refusal(404, message="not found"), NOBODY),
    ],
    ids=["invalid", "forbidden", "failed", "test of a JSON patch", "conflict", "gone"],
)
async def test_what_kubernetes_refuses_is_told_unless_somebody_was_only_faster(
    answer: ApiException, told: str
) -> None:
    memory = Memory(POOL, refuses=answer)

    assert await turn(memory)

    assert memory.told[0]["problem"].startswith(told)


async def test_pods_that_kubernetes_does_not_make_are_told() -> None:
    made = objects.deployment_of(POOL, 2)
    made["status"] = {
        "conditions": [
            {"type": "Progressing", "status": "True", "message": "created new replica set"},
            {"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: exceeded quota"},
        ]
    }
    memory = Memory(POOL, made)

    await turn(memory)

    assert memory.told[0]["problem"] == "pods is forbidden: exceeded quota", "more than that nobody answers"


class Elections(Leadership):
    """Elections that are won and lost as the test sets."""

    def __init__(self) -> None:
        self.won = asyncio.Event()
        self.released = False
        self._end = asyncio.Event()
        self._lost = asyncio.Event()

    def held(self) -> bool:
        return self.won.is_set()

    async def run(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self.won.wait()
            async with asyncio.TaskGroup() as tasks:
                leading = tasks.create_task(lead())
                await self._end.wait()
                self._end.clear()
                leading.cancel()
            self._lost.set()

    async def lose(self) -> None:
        self.won.clear()
        self._end.set()
        await self._lost.wait()
        self._lost.clear()

    async def release(self) -> None:
        self.released = True


def elected() -> Elections:
    found = Elections()
    found.won.set()
    return found


class Api:
    """A stub that is needed only to be closed."""

    async def close(self) -> None: ...


async def test_only_the_elected_operator_gives_turns_to_the_pools_that_all_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[str] = []

    class Counted(Memory):
        def __init__(self, _: Any, namespace: str, name: str) -> None:
            super().__init__(None)
            self.name = name

        async def pool(self) -> dict[str, Any] | None:
            turns.append(self.name)
            return {**POOL, "metadata": {**POOL["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}

    monkeypatch.setattr(operator, "Kubernetes", Counted)
    monkeypatch.setattr(operator, "TURN_S", 0.0)
    election = Elections()
    found = operator.Operator(Api(), None, election)
    found.look_after("models", "early")
    await asyncio.sleep(0)
    assert turns == []

    election.won.set()
    await wait_until_async(lambda: turns, description="the pool that was known before has turns")
    found.look_after("models", "late")
    await wait_until_async(lambda: "late" in turns, description="and one that comes later")

    await election.lose()
    turns.clear()
    found.look_after("models", "meanwhile")
    await asyncio.sleep(0)
    assert turns == [], "lost: nobody has a turn"

    election.won.set()
    await wait_until_async(lambda: set(turns) == {"early", "late", "meanwhile"}, description="all go on")
    await found.close()
    turns.clear()
    await asyncio.sleep(0)
    assert turns == [] and election.released


async def test_a_turn_that_may_not_act_any_more_changes_nothing() -> None:
    memory = Memory(POOL)
    await operator.turn(memory, None, get_logger("test"), lambda: False)
    assert (memory.written, memory.told) == ([], [])

    answers = iter([True, False])  # it may create the Deployment, and not report it
    await operator.turn(memory, None, get_logger("test"), lambda: next(answers))
    assert (len(memory.written), memory.told) == (1, [])


async def test_an_answer_that_never_comes_ends_a_turn_and_not_the_pools_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    class Silent(Memory):
        async def pool(self) -> dict[str, Any] | None:
            nonlocal asked
            asked += 1
            return POOL if asked == 1 else None

        async def pods(self) -> list[dict[str, Any]]:
            never: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
            return await never

    monkeypatch.setattr(operator, "Kubernetes", lambda *_: Silent(None))
    monkeypatch.setattr(operator, "TURN_LIMIT_S", 0.2)
    monkeypatch.setattr(operator, "TURN_S", 0.0)
    looks_after = operator.Operator(None, None, elected())

    looks_after.look_after("models", "p")

    await wait_until_async(lambda: asked == 2, description="another turn")


async def test_an_outage_of_kubernetes_is_told_once_and_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("refused"), OSError("refused"), OSError("reset"), POOL, None]

    class Away(Memory):
        async def pool(self) -> dict[str, Any] | None:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer) if answer else None

    monkeypatch.setattr(operator, "Kubernetes", lambda *_: Away(None))
    monkeypatch.setattr(operator, "TURN_S", 0.0)
    with capture_logs() as said:
        operator.Operator(None, None, elected()).look_after("models", "p")
        await wait_until_async(lambda: not answers, description="all are asked")

    events = [one["event"] for one in said if one["event"].startswith("a turn")]
    assert events == ["a turn failed; the next one begins anew"] * 2 + ["a turn succeeded again"]


class Shard:
    """A scheduler's part for two workers, "a" the cheaper one to lose: it names the one that is left when one
    drains.
    """

    def __init__(self) -> None:
        self.draining: list[str] = []

    async def shard(self, address: str, tls: Any) -> objects.Shard:
        left = [name for name in ("a", "b") if name not in self.draining]
        workers = tuple(Worker(name=name, draining=name not in left, requests=1) for name in ("a", "b"))
        return objects.Shard(
            workers=workers,
            cheapest=next(iter(left), None),
            queued=0,
            backlog_s=0.0,
            acceptance=0.0,
            tokens_per_s=0.0,
            policy="fcfs",
        )

    async def drain(self, address: str, tls: Any, worker: str) -> None:
        self.draining.append(worker)


async def test_a_policy_that_is_not_the_schedulers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "shard", Shard().shard)
    memory = Memory({**POOL, "spec": {**POOL["spec"], "policy": "las"}}, objects.deployment_of(POOL, 2))

    await turn(memory)

    assert memory.told[0]["problem"].startswith("the schedulers order by fcfs, not las")


async def test_gpus_without_a_rank_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "shard", Shard().shard)
    spec = POOL["spec"] | {
        "engine": "vllm",
        "vllmArgs": {"tensor_parallel_size": 2},
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    }
    pool = {**POOL, "spec": spec}
    memory = Memory(pool, objects.deployment_of(pool, 2))

    await turn(memory)

    assert memory.told[0]["problem"].startswith("workers have 4 GPUs, and vLLM makes 2 ranks")


@pytest.mark.parametrize("before", ["pool", "deployment", "pods", "shard", "patch_pod", "drain"])
async def test_another_operator_may_have_a_turn_at_any_point_and_one_worker_goes(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [
        {
            "metadata": {"name": name},
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for name in ("a", "b")
    ]
    memory = Memory(
        {**POOL, "spec": {**POOL["spec"], "replicas": 1}}, objects.deployment_of(POOL, 2), pods=running
    )
    asked = Shard()
    overtaken = 0

    def interrupted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        async def other_first(*arguments: Any) -> Any:
            nonlocal overtaken
            if not overtaken:
                overtaken += 1
                await turn(memory)
            return await call(*arguments)

        monkeypatch.setattr(owner, name, other_first)

    monkeypatch.setattr(scheduler, "shard", asked.shard)
    monkeypatch.setattr(scheduler, "drain", asked.drain)
    interrupted(memory if hasattr(memory, before) else scheduler, before)

    await turn(memory)

    assert overtaken == 1
    assert set(asked.draining) == {"a"}
    marked = [pod["metadata"]["name"] for pod in await memory.pods() if "annotations" in pod["metadata"]]
    assert marked == ["a"]
    assert memory.written == [], "it has a request still"
