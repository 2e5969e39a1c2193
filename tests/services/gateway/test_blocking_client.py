"""The blocking client: its thread, and what crosses the border between it and the caller's threads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laps_sd.client import Accepted, AsyncClient, AsyncStream, Client, Delta, Ended
from laps_sd.client.blocking import AHEAD, _Reader
from laps_sd.client.repair import Chosen
from laps_sd.errors import StartupError, Unavailable
from laps_sd.service.wire import Tls
from tests.helpers import free_port, wait_until_async
from tests.services.gateway.conftest import Running
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind


def address(running: Running) -> str:
    return f"127.0.0.1:{running.gateway.app.port}"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "laps-sd-client"]


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(address(running)) as client:
        yield client


class TestThread:
    async def test_begins_with_the_first_call_and_ends_with_close(self, running: Running) -> None:
        client = Client(address(running))
        assert threads() == []
        await asyncio.to_thread(client.models)
        assert threads() == ["laps-sd-client"]
        await asyncio.to_thread(client.close)
        assert threads() == []

        client.close()
        with pytest.raises(ValueError, match="closed"):
            client.models()
        with pytest.raises(ValueError, match="closed"):
            next(client.stream("x"))

    async def test_is_one_for_callers_on_several_threads(
        self, client: Client, scheduler: FakeScheduler
    ) -> None:
        def read(number: int) -> list[int]:
            deltas = [event for event in client.stream(f"x{number}") if isinstance(event, Delta)]
            return [token for delta in deltas for token in delta.token_ids]

        with ThreadPoolExecutor(5) as pool:
            answers = [asyncio.get_running_loop().run_in_executor(pool, read, n) for n in range(5)]
            for count in range(1, 6):
                scheduler.commit(await scheduler.submitted(count), [40, 41], Kind.KIND_STOP)
            assert await asyncio.gather(*answers) == [[40, 41]] * 5
        assert threads() == ["laps-sd-client"]

    async def test_works_in_a_program_that_has_a_loop_and_a_client_of_its_own(self, running: Running) -> None:
        async def program() -> None:
            async with AsyncClient(address(running)) as own:
                with Client(address(running)) as client:
                    for _ in range(20):
                        assert client.models() == await own.models()

        await asyncio.to_thread(asyncio.run, program())

    async def test_of_a_forgotten_client_ends(self, running: Running) -> None:
        await asyncio.to_thread(lambda: Client(address(running)).models())
        gc.collect()
        assert threads() == []

    async def test_of_a_client_that_only_a_stream_refers_to_lives(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        stream = Client(address(running)).stream("x")
        accepted = await asyncio.to_thread(next, stream)
        gc.collect()
        assert isinstance(accepted, Accepted)
        scheduler.commit(accepted.request_id, [40], Kind.KIND_STOP)
        assert isinstance((await asyncio.to_thread(list, stream))[-1], Ended)

    def test_files_that_cannot_be_read_are_an_error_of_the_constructor(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"none\.pem"):
            Client("127.0.0.1:1", tls=Tls(ca=tmp_path / "none.pem"))


FORK = """
import asyncio, os, sys
from laps_sd.client import AsyncClient, Client

def child(call):
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

async def use(client):
    async with client:
        return await client.models()

client = Client(sys.argv[1])
print(child(client.models))                                # it was not used before
if sys.argv[2] == "Client":
    client.models()
else:
    asyncio.run(use(AsyncClient(sys.argv[1])))
print(child(client.models), child(Client(sys.argv[1]).models))
client.close()
print(child(lambda: Client(sys.argv[1]).models()))
print(child(lambda: asyncio.run(use(AsyncClient(sys.argv[1])))))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("first", ["Client", "AsyncClient"])
async def test_a_process_forked_after_the_first_call_refuses_clients(running: Running, first: str) -> None:
    # uvloop would start it by a fork of this process, in which gRPC's threads run.
    program = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", FORK, address(running), first],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (program.returncode, program.stdout.split()) == (0, ["0", "7", "7", "7", "7"])


class TestEnds:
    async def test_close_ends_what_other_threads_wait_for(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        client = Client(address(running))
        stream = client.stream("x")
        await asyncio.to_thread(next, stream)
        waiting = [
            asyncio.create_task(asyncio.to_thread(list, stream)),
            asyncio.create_task(asyncio.to_thread(client.generate, "y")),
        ]
        await scheduler.submitted(2)
        await asyncio.to_thread(client.close)
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, ValueError)
        assert list(stream) == []

        # The client cancels a request whose id it knows. One whose acceptance was on its way loses its only
        # client: its gateway detaches.
        def left() -> bool:
            return (
                len({m.request_id for kind in ("cancel", "detach") for m in scheduler.all_heard(kind)}) == 2
            )

        await wait_until_async(left, description="both requests are cancelled or detached")

    async def test_an_interrupt_while_it_waits_cancels_the_request(
        self, client: Client, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = client.stream("x")
        accepted = await asyncio.to_thread(next, stream)

        def interrupted() -> Any:
            raise KeyboardInterrupt

        def read() -> None:
            with pytest.raises(KeyboardInterrupt):
                next(stream)

        monkeypatch.setattr(stream._reader, "take", interrupted)
        await asyncio.to_thread(read)
        assert isinstance(accepted, Accepted)
        assert scheduler.all_heard("cancel")[0].request_id == accepted.request_id
        assert list(stream) == []

    async def test_a_forgotten_stream_is_cancelled(self, client: Client, scheduler: FakeScheduler) -> None:
        accepted = await asyncio.to_thread(lambda: next(client.stream("x")))
        await scheduler.wait_heard("cancel")
        assert isinstance(accepted, Accepted)
        assert scheduler.all_heard("cancel")[0].request_id == accepted.request_id

    async def test_another_thread_may_close_a_stream(self, client: Client, scheduler: FakeScheduler) -> None:
        stream = client.stream("x")
        await asyncio.to_thread(next, stream)
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(stream.close)
        assert await asyncio.wait_for(reading, 5) == []

    async def test_nothing_is_sent_before_the_first_event_is_wanted(
        self, client: Client, scheduler: FakeScheduler
    ) -> None:
        stream = client.stream("x")
        await asyncio.to_thread(client.models)
        stream.close()
        assert list(stream) == []
        assert scheduler.all_heard("submit") == []

    def test_an_error_is_raised_once_and_then_the_stream_is_over(self) -> None:
        with Client(f"127.0.0.1:{free_port()}", retry_s=0.0) as client:
            stream = client.stream("x")
            with pytest.raises(Unavailable):
                next(stream)
            assert list(stream) == []


class TestReader:
    @staticmethod
    def events(count: int, made: list[int]) -> AsyncStream:
        async def generate() -> AsyncGenerator[Chosen, None]:
            for number in range(count):
                made.append(number)
                yield number, Delta(text=str(number))

        return AsyncStream(generate())

    async def test_a_slow_caller_holds_up_the_stream(self) -> None:
        made: list[int] = []
        reader = _Reader()
        reading = asyncio.create_task(reader.read(self.events(3 * AHEAD, made)))
        read: list[int] = []
        for _ in range(3):
            await wait_until_async(
                lambda: reader.full or reading.done(), description="it waits", every_s=0.001
            )
            assert len(made) - len(read) <= AHEAD
            while len(read) < len(made):
                batch = reader.take()
                assert batch is not None
                read += [choice for choice, _ in batch]
            reader.resume()
            await asyncio.sleep(0)
        await reading
        reader.end()
        while (batch := reader.take()) is not None:
            read += [choice for choice, _ in batch]
        assert read == list(range(3 * AHEAD))

    async def test_a_caller_that_takes_all_while_the_stream_is_about_to_wait_does_not_hold_it_up(
        self,
    ) -> None:
        """It has seen a stream that does not wait, so it does not wake it."""

        class TakenAtOnce(_Reader):
            def _pass_on(self) -> None:
                super()._pass_on()
                while not self.batches.empty():
                    self.take()

        made: list[int] = []
        async with asyncio.timeout(30.0):
            await TakenAtOnce().read(self.events(3 * AHEAD, made))
        assert len(made) == 3 * AHEAD

    async def test_no_event_waits_for_the_one_after_it(self) -> None:
        reader = _Reader()
        taken: list[int] = []

        def is_taken(number: int) -> bool:
            while not reader.batches.empty():
                taken.extend(choice for choice, _ in reader.take() or ())
            return number in taken

        async def two_by_two() -> AsyncGenerator[Chosen, None]:
            for last in (1, 3, 5, 7):
                yield last - 1, Delta()
                yield last, Delta()
                await wait_until_async(partial(is_taken, last), description=f"{last} arrives", every_s=0.001)

        await reader.read(AsyncStream(two_by_two()))
        assert taken == list(range(8))

    async def test_the_first_event_comes_at_once_and_those_right_after_it_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("laps_sd.client.blocking.BATCH_S", 10.0)  # however busy the machine is
        reader = _Reader()
        await reader.read(self.events(10, []))
        reader.end()
        first, second = reader.take(), reader.take()
        assert first is not None and [choice for choice, _ in first] == [0]
        assert second is not None and [choice for choice, _ in second] == list(range(1, 10))
        assert reader.take() is None
