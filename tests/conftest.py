"""Fixtures for every test: a whole stack of processes, and where to run models.

def test_something(fake_stack):                       # shared by all tests: do not break it
    grpc.insecure_channel(fake_stack.gateway_address)

def test_a_fault(make_stack):                         # its own: break what you like
    stack = make_stack(workers=2, engine="fake")
    stack.kill("worker-0")
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

import gateway  # noqa: F401 -- before gRPC, for which it sets a variable
from laps_sd.stack.local import LocalStack
from tests import helpers

# Before torch is imported anywhere: two threads on busy cores spin on each other and are many times slower
# than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control has what it runs in the background ignore Ctrl-C, and so would every process
# that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

StackMaker = Callable[..., LocalStack]
LONG_TIMEOUT_S = 900
"""Seconds for a long test; the others have those of pyproject.toml."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="where model tests run: cpu (the default), cuda or cuda:N; LAPS_SD_TEST_DEVICE"
    )
    parser.addoption(
        "--before",
        metavar="REVISION",
        help="whose worker and gateway must work with this scheduler: the last tag",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device"):
        os.environ["LAPS_SD_TEST_DEVICE"] = config.getoption("--device")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what is collected here: modules and tests stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests import distribution  # needs xdist, which an environment with vLLM may lack

    return distribution.Distribution(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["dist"] = node.config.getoption("dist")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if getattr(config, "workerinput", {}).get("dist") == "loadfile":  # one of several processes
        from tests import distribution

        items.sort(key=lambda item: distribution.rank(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands find the `laps-sd up` of these tests, and no other of this machine."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def device() -> str:
    return os.environ.get("LAPS_SD_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session")
def fake_stack() -> Iterator[LocalStack]:
    """Start one scheduler, two workers with scripted tokens, one gateway; tests must leave the stack
    unchanged.
    """
    with LocalStack(workers=2, engine="fake", environment={"LAPS_SD_FAKE_TIME_SCALE": "0.1"}) as stack:
        yield stack


@pytest.fixture(scope="session")
def demo_stack(device: str) -> Iterator[LocalStack]:
    """Start one scheduler, one worker with the shipped model pair, one gateway; tests must leave the stack
    unchanged.
    """
    with LocalStack(workers=1, engine="demo", device=device) as stack:
        yield stack


@pytest.fixture
def make_stack() -> Iterator[StackMaker]:
    """Start stacks that the test may break; any remaining part is stopped at its end."""
    stacks: list[LocalStack] = []

    def make(**settings: object) -> LocalStack:
        stack = LocalStack(**{"engine": "fake", **settings})  # type: ignore[arg-type]
        stacks.append(stack)
        return stack.start()

    yield make
    for stack in stacks:
        stack.stop()


@pytest.fixture
def free_port() -> Callable[[], int]:
    return helpers.free_port
