"""The command line against a running stack, as a user types it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from laps_sd.cli import dial, generate, main
from laps_sd.cli.leader import Leader
from laps_sd.cli.operate import explanation_lines, queue_table, workers_table
from laps_sd.client import Client
from laps_sd.errors import (
    LapsSdError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    describe,
    details_metadata,
)
from laps_sd.service.wire import Tls
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from tests.certificates import certificate, write_certificates
from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LAPS_SD_")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def as_a_process(
    *arguments: str, cwd: Path = ROOT, text: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laps_sd", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        timeout=60,
        input=text,
    )


PROCESSES = ("up", "gateway", "scheduler", "worker", "record", "bench")
"""Commands that become another program, or change what signals do."""


def laps_sd(*arguments: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process where it can: an interpreter takes longer to start than most commands
    run.
    """
    if arguments[:1] and arguments[0] in PROCESSES:
        return as_a_process(*arguments, text=text, **variables)
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["laps-sd", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(text)),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    if isinstance(code, str):
        print(code, file=stderr)
        code = 1
    return subprocess.CompletedProcess(arguments, code or 0, stdout.getvalue(), stderr.getvalue())


def test_generate_streams_text_and_says_what_speculation_did(fake_stack):
    done = as_a_process(
        "generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "12", "--seed", "1"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"^-- length: 12 tokens in \d+ rounds, drafted \d+, accepted \d+", done.stderr)


def test_generate_says_on_a_terminal_what_a_request_waits_for(make_stack, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(generate, "SILENT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Client(make_stack(workers=0).gateway_address) as client, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(generate.print_text, client.stream("Once"), client)
        [request_id] = wait_until(
            lambda: re.findall(
                r"-- it waits for a worker: none takes work now  \[(s0\.\w+)\]\n", sys.stderr.getvalue()
            ),
            description="the reason is shown",
        )
        client.cancel(request_id)
        assert ended.result().finish_reason == pb.FINISH_REASON_CANCELLED


def test_generate_reads_standard_input_and_repeats_itself_with_a_seed(fake_stack):
    arguments = ("--url", fake_stack.gateway_address, "--max-tokens", "12", "--seed", "7")

    first = laps_sd("generate", "-", *arguments, text="Once upon")
    second = laps_sd("generate", "Once upon", *arguments)

    assert first.stdout == second.stdout != ""


def test_generate_json_is_one_message_a_line(fake_stack):
    done = laps_sd("generate", "Once", "--json", "--url", fake_stack.gateway_address, "--max-tokens", "4")

    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert next(iter(messages[0])) == "accepted"
    assert messages[-1]["end"]["usage"]["completion_tokens"] == 4


def test_chat_answers_each_line_with_the_conversation_in_mind_until_it_is_reset(fake_stack):
    lines = "Once\nOnce\n/reset\n\nOnce\n/quit\nnever answered\n"

    done = laps_sd(
        "chat", "--url", fake_stack.gateway_address, "--max-tokens", "8", "--seed", "5", "--stats", text=lines
    )

    assert (done.returncode, done.stderr.count("-- length: 8 tokens")) == (0, 3), done.stderr
    ids = re.findall(r"\[(\S+)\]", done.stderr)
    assert len(set(ids)) == 3
    # The same seed and the same prompt give the same text, so equal texts mean equal prompts.
    alone = laps_sd(
        "generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "8", "--seed", "5"
    ).stdout
    assert done.stdout.startswith(alone)
    assert done.stdout.endswith(alone)
    second = done.stdout.removeprefix(alone).removesuffix(alone)
    assert second.strip()
    assert second != alone


def test_chat_keeps_the_system_message_when_it_is_reset(fake_stack):
    arguments = (
        "--url",
        fake_stack.gateway_address,
        "--max-tokens",
        "8",
        "--seed",
        "5",
        "--system",
        "Be brief.",
    )

    done = laps_sd("chat", *arguments, text="Once\n/reset\nOnce\n")

    assert done.stdout == 2 * laps_sd("generate", "Once", *arguments).stdout


def test_chat_of_lines_stops_at_the_first_that_fails(fake_stack):
    done = laps_sd("chat", "--url", fake_stack.gateway_address, "--model", "unheard-of", text="Once\nTwice\n")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("laps-sd: INVALID_ARGUMENT: model must be")


IN_CHARGE = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "laps_sd", *sys.argv[1:]])
"""
"""Runs the command with its input as the controlling terminal of its session: Ctrl-C reaches the processes of that. Not in `preexec_fn`:
a process with threads can hang between fork and exec.
"""


@contextlib.contextmanager
def on_a_terminal(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_CHARGE, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment(**{"TERM": "dumb", **variables}),
        start_new_session=True,
    )
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(theirs)  # not before: what the process leaves behind can be looked at after its end
        os.close(ours)


def read_until(terminal: int, sign: str) -> str:
    seen = ""

    def more() -> str:
        nonlocal seen
        if select.select([terminal], [], [], 0)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace").replace("\r\n", "\n")
        return seen if sign in seen else ""

    return wait_until(more, description=f"{sign!r} on the terminal")


def test_chat_on_a_terminal_goes_on_after_a_mistake_and_ends_with_ctrl_d(fake_stack):
    arguments = ("--url", fake_stack.gateway_address, "--max-tokens", "8", "--seed", "5", "--stats")
    with on_a_terminal("chat", *arguments) as (process, terminal):
        read_until(terminal, "\n> ")
        os.write(terminal, b"Once\n")
        assert "-- length: 8 tokens" in read_until(terminal, "\n> ")
        os.write(terminal, b"/forget\n")
        assert "/reset clears the conversation" in read_until(terminal, "\n> ")
        os.write(terminal, b"\x03")
        assert "/quit or Ctrl-D ends it" in read_until(terminal, "\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(20) == 0


def test_ctrl_c_ends_an_answer_but_not_the_conversation(fake_stack):
    # Too long for the test to wait for its end.
    arguments = ("--url", fake_stack.gateway_address, "--max-tokens", "7000", "--seed", "1", "--stats")
    with on_a_terminal("chat", *arguments) as (process, terminal):
        read_until(terminal, "\n> ")
        os.write(terminal, b"Once\n")
        read_until(terminal, " ")
        os.write(terminal, b"\x03")
        assert "-- " not in read_until(terminal, "\n> ")
        os.write(terminal, b"/quit\n")
        assert process.wait(20) == 0


def test_explain_tells_the_story_of_a_request(fake_stack):
    done = laps_sd("generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "4")
    request_id = re.search(r"\[(\S+)\]", done.stderr).group(1)

    told = laps_sd("explain", request_id, "--url", fake_stack.gateway_address)

    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"{request_id}  ended, length")


def test_explain_says_why_a_request_ended():
    ended = pb.Explanation(
        request_id="s0.a", state=pb.Explanation.STATE_ENDED, finish_reason=pb.FINISH_REASON_ERROR
    )
    without_reason = explanation_lines(ended)
    ended.basis = "its KV cache does not fit into any worker"
    with_reason = explanation_lines(ended)

    assert without_reason[0] == "s0.a  ended, error"
    assert with_reason[0] == "s0.a  ended, error: its KV cache does not fit into any worker"


def test_a_state_that_only_a_later_version_knows_is_a_question_mark():
    later = max(pb.Explanation.State.values()) + 1
    queue = admin_pb2.ListQueueResponse(entries=[admin_pb2.QueueEntry(request_id="s0.a", state=later)])

    assert explanation_lines(pb.Explanation(request_id="s0.a", state=later))[0] == "s0.a  ?"
    assert "?" in drawn(queue_table(queue), 200)


def test_explain_names_level_and_perceptible_where_the_policy_has_them():
    waits = pb.Explanation(
        request_id="s0.a", state=pb.Explanation.STATE_QUEUED, policy="fcfs", ahead=3, ordered_by="its turn"
    )
    plain = explanation_lines(waits)
    waits.level, waits.policy = 0, "mlfq"
    by_level = explanation_lines(waits)
    waits.perceptible = False
    by_both = explanation_lines(waits)
    waits.ahead = 1
    behind_one = explanation_lines(waits)

    assert plain[1:3] == ["policy fcfs, 3 requests before it", "ordered by its turn"]
    assert by_level[1] == "policy mlfq, level 0, 3 requests before it"
    assert by_both[1] == "policy mlfq, level 0, non-perceptible, 3 requests before it"
    assert behind_one[1] == "policy mlfq, level 0, non-perceptible, 1 request before it"


def test_explain_says_what_puts_others_before_it_and_what_it_waits_for():
    waits = pb.Explanation(
        request_id="s0.a", state=pb.Explanation.STATE_QUEUED, policy="laps-sd", level=3, ahead=9,
        ahead_by_priority=4, ahead_by_tenant=2, ahead_by_level=2, age_s=7.5,
        story=[pb.StoryLine(what="arrived")],
    )  # fmt: skip
    told = explanation_lines(waits)
    waits.waits_for, waits.reserved = "a worker: none takes work now", True
    alone = explanation_lines(waits)

    assert told[1] == (
        "policy laps-sd, level 3, 9 requests before it: "
        "4 of higher priority, 2 of tenants that had less, 2 at lower levels, 1 sooner by its order"
    )
    assert any(line.endswith("… 7.500 s") for line in told), "the bar goes on until now"
    assert "waits for a worker: none takes work now" in alone
    assert "among the oldest: they have a share of the slots whatever their rank" in alone


def test_explain_reads_a_scheduler_that_does_not_say_what_orders_it():
    told = explanation_lines(pb.Explanation(state=pb.Explanation.STATE_RUNNING, policy="laps-sd", level=2))

    assert told[1] == "policy laps-sd, level 2, 0 requests before it"
    assert "ordered by" not in "".join(told)


def test_the_queue_has_a_column_for_perceptible_where_the_policy_knows_it():
    def columns(*entries):
        reply = admin_pb2.ListQueueResponse(entries=entries)
        table = queue_table(reply)
        return {str(column.header): list(map(str, column.cells)) for column in table.columns}

    plain = columns(admin_pb2.QueueEntry(request_id="a", ordered_by="its turn"))
    known = columns(
        admin_pb2.QueueEntry(request_id="a", perceptible=True), admin_pb2.QueueEntry(perceptible=False)
    )

    assert plain["ordered by"] == ["its turn"]
    assert "perceptible" not in plain
    assert known["perceptible"] == ["yes", "no"]


def test_queue_and_workers_show_the_shard(fake_stack):
    queue = laps_sd("queue", "--scheduler", fake_stack.scheduler_address)
    workers = laps_sd("workers", "--scheduler", fake_stack.scheduler_address)

    assert "0 requests, by laps-sd" in queue.stdout, queue.stderr
    assert "worker-0" in workers.stdout, workers.stderr
    assert "worker-1" in workers.stdout
    as_json = laps_sd("workers", "--json", "--scheduler", fake_stack.scheduler_address)
    assert len(json.loads(as_json.stdout)["workers"]) == 2


LONG_ID = "s0.w3x6uxgjxr3hhst7g7lydh77ha"


def queue_of(count: int) -> admin_pb2.ListQueueResponse:
    entry = admin_pb2.QueueEntry(
        request_id=LONG_ID, state=pb.Explanation.STATE_RUNNING, ordered_by="level 3, then 12.345 s that remain",
        waiting_s=1234.5, attained_s=123.456, emitted_tokens=12345, worker_id="worker-0-8e25374c", perceptible=True,
    )  # fmt: skip
    return admin_pb2.ListQueueResponse(entries=[entry] * count, total=count)


def drawn(table: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), legacy_windows=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60, 40, 31])
def test_the_queue_fits_the_terminal_and_its_ids_are_whole(width):
    shown = drawn(queue_table(queue_of(3), width), width)

    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert shown.count(LONG_ID) == 3


def test_a_narrower_terminal_has_fewer_columns_and_the_most_important_last():
    def titles(width: int | None) -> list[str]:
        return [str(column.header) for column in queue_table(queue_of(1), width).columns]

    assert len(titles(None)) == 9
    assert titles(80) == ["request", "state", "waiting s", "tokens", "worker"]
    assert titles(40) == ["request", "state"]
    assert "…" in drawn(queue_table(queue_of(1), 130), 130), (
        "a phrase is shortened before columns are left out"
    )


def test_the_workers_fit_the_terminal():
    worker = admin_pb2.WorkerStatus(
        worker_name="worker-of-the-second-rack", device="cuda:0", slots=64, rounds=10**9
    )
    reply = admin_pb2.ListWorkersResponse(workers=[worker])

    for width in (120, 80, 60, 40):
        shown = drawn(workers_table(reply, width), width)
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
        assert "worker-of-the-second-rack" in shown
    assert "rounds" in drawn(workers_table(reply, None), 200)


def test_names_in_a_table_are_no_markup() -> None:
    reply = admin_pb2.ListWorkersResponse()
    reply.workers.add(worker_id="w", worker_name="rack[gpu]", device="[/bold] CPU", connected=True)

    shown = drawn(workers_table(reply), 200)
    assert "rack[gpu]" in shown
    assert "[/bold] CPU" in shown


@pytest.mark.parametrize("command", ["queue", "workers"])
def test_a_watched_command_shows_it_again_and_ends_with_ctrl_c(fake_stack, command):
    arguments = [sys.executable, "-m", "laps_sd", command, "--watch", "--json"]
    with subprocess.Popen(
        [*arguments, "--scheduler", fake_stack.scheduler_address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 0
    assert all(json.loads(line) for line in lines)


def test_a_watched_command_on_a_terminal_leaves_it_as_it_was(fake_stack):
    with on_a_terminal("workers", "--watch", "--scheduler", fake_stack.scheduler_address, TERM="xterm") as (
        process,
        terminal,
    ):
        read_until(terminal, "worker-1")
        os.write(terminal, b"\x03")
        assert "\x1b[?1049l" in read_until(terminal, "\x1b[?25h"), "the screen before, and its cursor"
        assert process.wait(20) == 0


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
@pytest.mark.parametrize("way", ["q", "Ctrl-C", "Ctrl-C after the connection was lost", "SIGTERM", "SIGINT"])
def test_top_leaves_the_terminal_as_it_was(way, variables, make_stack):
    stack = make_stack()
    options = ("--scheduler", stack.scheduler_address)
    fresh = os.openpty()
    before = termios.tcgetattr(fresh[0])
    for end in fresh:
        os.close(end)
    with on_a_terminal("top", *options, TERM="xterm-256color", COLUMNS="80", LINES="24", **variables) as (
        process,
        terminal,
    ):
        seen = read_until(terminal, "worker-0")
        assert termios.tcgetattr(terminal) != before
        match way:
            case "SIGTERM":
                process.terminate()
            case "SIGINT":
                process.send_signal(signal.SIGINT)
            case "q":
                os.write(terminal, b"q")
            case "Ctrl-C":
                os.write(terminal, b"\x03")
            case _:
                stack.kill("scheduler")
                seen += read_until(terminal, "trying again")
                os.write(terminal, b"\x03")
        seen += read_until(terminal, "\x1b[?1049l")
        assert process.wait(20) == 0
        assert termios.tcgetattr(terminal) == before
    colours = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", seen) for code in codes.split(";")}
    if variables:
        assert colours <= {"0", "1", "4", "7", "39", "49"}, (
            "bold, underlined, reversed, and the default colours"
        )
    else:
        assert "32" in colours


class Standby(admin_pb2_grpc.AdminServicer):
    """A scheduler that refers to a leader."""

    leader = ""

    def GetShard(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the leader is {self.leader}")


@pytest.fixture
def standby() -> Iterator[tuple[Standby, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(1)), Standby()
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def test_a_leader_that_was_found_is_called_first_and_its_channel_kept(fake_stack, standby):
    servicer, address = standby
    servicer.leader = fake_stack.scheduler_address
    used = []

    def call(channel: grpc.Channel) -> str:
        used.append(channel)
        return admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb2.GetShardRequest(), timeout=10).shard

    with contextlib.closing(Leader(address, Tls())) as leader:
        assert [leader.call(call) for _ in range(3)] == ["s0"] * 3

    assert len(used) == 4
    assert len(set(used)) == 2


def test_after_a_scheduler_that_does_not_answer_the_next_one_is_called(fake_stack):
    def call(channel: grpc.Channel) -> str:
        return admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb2.GetShardRequest(), timeout=0.5).shard

    with socket.create_server(("127.0.0.1", 0)) as silent:
        seeds = f"127.0.0.1:{silent.getsockname()[1]},{fake_stack.scheduler_address}"
        with contextlib.closing(Leader(seeds, Tls())) as leader:
            assert leader.call(call) == "s0"


def test_a_standby_that_refers_to_no_address_is_quoted(standby):
    servicer, address = standby
    servicer.leader = "127.0.0.1:99999"

    with (
        contextlib.closing(Leader(address, Tls())) as leader,
        pytest.raises(grpc.RpcError, match=r"the leader is 127\.0\.0\.1:99999"),
    ):
        leader.call(lambda channel: admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb2.GetShardRequest()))


@pytest.mark.parametrize("leader_first", [True, False])
@pytest.mark.parametrize(
    ("leader", "referral", "said"),
    [
        ("unavailable", True, "UNAVAILABLE: the record is gone"),
        ("silent", True, "DEADLINE_EXCEEDED: "),
        ("dead", True, "UNAVAILABLE: failed to connect"),
        ("dead", False, "FAILED_PRECONDITION: the leader is unknown"),
    ],
)
def test_the_error_is_that_of_the_scheduler_which_explains_most(
    leader_first, leader, referral, said, standby
):
    class Unable(admin_pb2_grpc.AdminServicer):
        def GetShard(self, request: Any, context: Any) -> Any:
            error = Unavailable("the record is gone", retry_after_s=1.0)
            context.set_trailing_metadata(details_metadata(error))
            context.abort(error.code, error.message)

    servicer, address = standby
    with contextlib.ExitStack() as stack:
        match leader:
            case "unavailable":
                server = grpc.server(ThreadPoolExecutor(1))
                stack.callback(server.stop, None)
                admin_pb2_grpc.add_AdminServicer_to_server(Unable(), server)
                port = server.add_insecure_port("127.0.0.1:0")
                server.start()
            case "silent":
                port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            case _:
                port = free_port()
        servicer.leader = f"127.0.0.1:{port}" if referral else "unknown"
        seeds = [f"127.0.0.1:{port}", address]
        calls = stack.enter_context(
            contextlib.closing(Leader(",".join(seeds if leader_first else reversed(seeds)), Tls()))
        )
        with pytest.raises(grpc.RpcError) as raised:
            calls.call(
                lambda channel: admin_pb2_grpc.AdminStub(channel).GetShard(
                    admin_pb2.GetShardRequest(), timeout=0.5
                )
            )

    assert describe(raised.value).startswith(said)


def test_top_without_its_package_names_the_command_that_installs_it():
    with mock.patch("importlib.util.find_spec", return_value=None):
        done = laps_sd("top")

    assert done.returncode == 1
    assert done.stderr == "laps-sd: `laps-sd top` needs the package textual: pip install 'laps-sd[top]'\n"


NOT_UTF8 = b"\xff".decode(errors="surrogateescape")
ANY_PORTS = ("--grpc-port", "0", "--metrics-port", "0")
"""A byte that is not UTF-8, as Python has it in arguments."""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "Once", "--max-tokens", "-3"), "max-tokens"),
        (("generate", "Once", "--max-tokens", str(2**32)), "--max-tokens"),
        (("generate", "Once", "--top-k", str(2**32)), "--top-k"),
        (("generate", "Once", "--seed", str(2**64)), "--seed"),
        (("generate", "Once", "--priority", str(2**31)), "--priority"),
        (("generate", "Once", "--priority", str(-(2**31) - 1)), "--priority"),
        (("generate", "Once", "--draft-tokens", str(2**32)), "--draft-tokens"),
        (("generate", "Once", "--expected-tokens", str(2**32)), "--expected-tokens"),
        (("generate", "Once", "--time-limit", "inf"), "--time-limit"),
        (("generate", "Once", "--time-limit", "1e300"), "--time-limit"),
        (("generate", "Once", "--time-limit", "nan"), "--time-limit"),
        (("chat", "--timeout", "inf"), "--timeout"),
        (("generate", "Once", "--idempotency-key", NOT_UTF8), "must be UTF-8"),
        (("chat", "--system", NOT_UTF8), "must be UTF-8"),
        (("explain", NOT_UTF8), "must be UTF-8"),
        (("drain", NOT_UTF8), "must be UTF-8"),
        (("queue", "--scheduler", f"{NOT_UTF8}:1"), "must be UTF-8"),
        (("generate", "Once", "--api-key", "key\n"), "LAPS_SD_API_KEY"),
        (("explain", "s0.x", "--api-key", "schlüssel"), "LAPS_SD_API_KEY"),
        (("bench", "nonsense"), "There is no benchmark 'nonsense'"),
        (("up", "--target", "/nowhere"), "--target /nowhere does not exist"),
        (("up", "--draft", "/nowhere"), "--draft needs a target"),
        (("up", "--engine", "fake", "--target", "/nowhere"), "leave out --engine or the target"),
        (("up", "--gateway-port", "65536"), "--gateway-port"),
        (
            ("up", "--redis-url", "redis://127.0.0.1:1/0"),
            "no Redis answers at 127.0.0.1:1 (Connection refused)",
        ),
        (("scheduler", "--redis-url", "localhost:6379"), "LAPS_SD_REDIS_URL must be redis://HOST:PORT/DB"),
        (("scheduler", "--redis-url", "redis://me:hunter2@store:port/0"), "redis://me:********@store:port/0"),
        (
            ("scheduler", *ANY_PORTS, "--redis-url", "redis://store/0?nonsense=1"),
            "scheduler: LAPS_SD_REDIS_URL has an option that cannot be used",
        ),
        (
            ("record", "--redis-url", "unix:///tmp/store?db=first"),
            "record: LAPS_SD_REDIS_URL has an option that cannot be used: Invalid value for 'db'",
        ),
        (("generate", "Once", "--url", "localhost"), "got 'localhost'"),
        (("generate", "Once", "--url", "ftp://127.0.0.1:50051"), "or grpcs://host:port for TLS"),
        (("queue", "--scheduler", "here,there"), "got 'here'"),
        (("queue", "--scheduler", "fd00::7:50052"), "got 'fd00::7:50052'"),
        (("top", "--scheduler", "127.0.0.1:1"), "`laps-sd top` needs a terminal"),
    ],
)
def test_a_mistake_is_a_sentence_and_a_non_zero_exit(arguments, sentence):
    done = laps_sd(*arguments)

    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"], ids=["in UTF-8", "in C"])
@pytest.mark.parametrize("command", [("generate", "-"), ("chat",)], ids=" ".join)
def test_an_input_that_is_not_utf8_is_a_mistake(fake_stack, command, errors):
    """Python reads standard input by the locale: it raises, or keeps the bytes as surrogates."""
    arguments = ["laps-sd", *command, "--url", fake_stack.gateway_address]
    stdin = io.TextIOWrapper(io.BytesIO(b"Once \xff\n"), encoding="utf-8", errors=errors)
    stderr = io.StringIO()
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "stdin", stdin),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main()

    assert ended.value.code
    assert "the prompt and the options must be UTF-8" in stderr.getvalue()


@pytest.mark.parametrize(
    ("option", "largest", "said"),
    [
        ("--seed", str(2**64 - 1), "-- length: 2 tokens"),
        ("--time-limit", "4294967", "time_limit_ms must be from 1 to"),
        ("--priority", str(-(2**31)), "priority must be from"),
    ],
)
def test_a_number_that_a_request_can_hold_is_left_to_the_gateway(fake_stack, option, largest, said):
    done = laps_sd(
        "generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "2", option, largest
    )

    assert said in done.stderr


def test_the_wrong_address_says_what_answers_there(fake_stack):
    at_scheduler = laps_sd("generate", "Once", "--url", fake_stack.scheduler_address)
    at_gateway = laps_sd("queue", "--scheduler", fake_stack.gateway_address)
    metrics = fake_stack.metrics_url("gateway").removeprefix("http://").removesuffix("/metrics")
    at_metrics = laps_sd("generate", "Once", "--url", metrics)
    without_tls = laps_sd("generate", "Once", "--url", f"grpcs://{fake_stack.gateway_address}")

    assert "A gateway (--url" in at_scheduler.stderr
    assert "a scheduler (--scheduler" in at_gateway.stderr
    assert "does not speak gRPC" in at_metrics.stderr
    assert "If the server speaks plain text, leave out grpcs:// and --tls-ca, and unset" in without_tls.stderr
    assert {each.returncode for each in (at_scheduler, at_gateway, at_metrics, without_tls)} == {1}


def test_a_certificate_that_does_not_fit_says_which_flag_is_missing(tmp_path):
    ours = certificate(write_certificates(tmp_path / "tls"), "gateway", "DNS:models.test")
    assert ours.ca and ours.cert and ours.key
    pair = [(ours.key.read_bytes(), ours.cert.read_bytes())]
    server = grpc.server(ThreadPoolExecutor(1))
    one_sided = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    mutual = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pair, ours.ca.read_bytes(), require_client_auth=True)
    )
    server.start()
    trusted = ("--tls-ca", str(ours.ca))
    try:
        without_tls = laps_sd("generate", "Once", "--url", f"127.0.0.1:{one_sided}")
        unnamed = laps_sd("generate", "Once", "--url", f"grpcs://127.0.0.1:{one_sided}", *trusted)
        uncertified = laps_sd(
            "explain",
            "s0.x",
            "--url",
            f"grpcs://127.0.0.1:{mutual}",
            *trusted,
            "--tls-name",
            "models.test",
        )
    finally:
        server.stop(None)

    assert "is for another name (" in unnamed.stderr and "--tls-name" in unnamed.stderr
    for done in (without_tls, uncertified):
        assert "Does it need TLS (grpcs://), or a client certificate (--tls-cert)?" in done.stderr
    assert {done.returncode for done in (without_tls, unnamed, uncertified)} == {1}


def test_a_key_that_is_missing_or_unknown_names_the_flag_and_the_variable(make_stack, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(laps_sd("key", "acme").stderr)
    stack = make_stack(workers=0, environment={"LAPS_SD_API_KEYS_FILE": str(keys)})
    at = ("--url", stack.gateway_address)

    for done in (
        laps_sd("generate", "Once", *at),
        laps_sd("explain", "s0.x", *at, LAPS_SD_API_KEY="laps-sd-unknown"),
    ):
        assert done.returncode == 1
        assert done.stderr.startswith("laps-sd: UNAUTHENTICATED: ")
        assert done.stderr.endswith(". --api-key or LAPS_SD_API_KEY gives the key to this command.\n")


@pytest.mark.parametrize("asked", [("generate", "Once"), ("chat",)])
def test_a_deadline_that_passed_names_its_flag_and_the_one_that_keeps_the_text(fake_stack, asked):
    done = laps_sd(
        *asked,
        "--timeout",
        "0.05",
        "--max-tokens",
        "1500",
        "--url",
        fake_stack.gateway_address,
        text="Once\n",
    )

    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("laps-sd: DEADLINE_EXCEEDED: ")
    assert "--timeout 0.05 (seconds)" in said and "--time-limit" in said


class Failing(inference_pb2_grpc.InferenceServicer):
    """Gateway whose streams fail with this error."""

    def __init__(self, error: LapsSdError, *, accepted: bool) -> None:
        self._error, self._accepted = error, accepted

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerateEvent]:
        if self._accepted:
            yield pb.GenerateEvent(accepted=pb.Accepted(request_id="s0.kept"))
        context.set_trailing_metadata(details_metadata(self._error))
        context.abort(self._error.code, self._error.message)


@pytest.mark.parametrize(
    ("error", "accepted", "said"),
    [
        (NotFound("it is gone"), True, "NOT_FOUND: it is gone (request s0.kept)"),
        (LapsSdError("a bug"), True, "UNKNOWN: a bug (request s0.kept)"),
        (ResourceExhausted("no room"), True, "RESOURCE_EXHAUSTED: no room (request s0.kept)"),
        (
            ResourceExhausted("no room", retry_after_s=2.5),
            False,
            "RESOURCE_EXHAUSTED: no room (try again in 2.5 s)",
        ),
    ],
)
def test_the_error_of_a_lost_stream_names_the_request_and_when_to_retry(error, accepted, said):
    server = grpc.server(ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServicer_to_server(Failing(error, accepted=accepted), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = laps_sd("generate", "--raw", "--keep", "Once", "--url", f"127.0.0.1:{port}")
    finally:
        server.stop(None)

    assert (done.returncode, done.stderr) == (1, f"laps-sd: {said}\n")


def test_a_system_message_needs_a_template(fake_stack):
    done = laps_sd("generate", "Once", "--raw", "--system", "Be brief.", "--url", fake_stack.gateway_address)

    assert (done.returncode, done.stdout) == (2, "")
    assert "leave out --raw" in done.stderr


def test_draining_an_unknown_worker_says_where_the_names_are(fake_stack):
    done = laps_sd("drain", "nobody", "--scheduler", fake_stack.scheduler_address)

    assert done.stderr == "laps-sd: NOT_FOUND: no worker 'nobody'; `laps-sd workers` lists them\n"


def test_a_certificate_of_another_name_is_taken_where_the_name_is_given(tmp_path):
    """With a port-forward, no certificate is for localhost."""
    ours = certificate(write_certificates(tmp_path / "tls"), "gateway", "DNS:models.test")
    assert ours.ca and ours.cert and ours.key
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(ours.key.read_bytes(), ours.cert.read_bytes())])
    )
    server.start()
    codes = {}
    try:
        for name in ("", "models.test", "other.test"):
            with (
                dial.channel(f"grpcs://127.0.0.1:{port}", Tls(ca=ours.ca), name) as channel,
                pytest.raises(grpc.RpcError) as caught,
            ):
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            codes[name] = caught.value.code()
            with (
                dial.client(f"grpcs://127.0.0.1:{port}", Tls(ca=ours.ca), name=name) as client,
                pytest.raises(LapsSdError) as raised,
            ):
                client.models(timeout_s=10)
            assert raised.value.code is codes[name]
    finally:
        server.stop(None)
    there, refused = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE
    assert codes == {"": refused, "models.test": there, "other.test": refused}


def test_ctrl_c_before_the_command_has_begun_is_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")

    done = as_a_process("queue", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed_are_no_others(fake_stack, closed):
    """The client's sockets got their numbers, and the event loop aborted the process."""
    command = [sys.executable, "-m", "laps_sd", "generate", "-" if "<" in closed else "Once"]
    command += ["--url", fake_stack.gateway_address, "--max-tokens", "4"]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {closed}"], capture_output=True, text=True, env=environment()
    )

    assert done.returncode == (1 if "<" in closed else 0), done.stderr  # an empty prompt is refused
    assert ("-- length: 4 tokens" in done.stderr) == (closed == ">&-")
    assert ("must hold at least one message" in done.stderr) == (closed == "<&-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it has no device that is full")
def test_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "laps_sd", "config", "scheduler"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    assert done.stderr == "laps-sd: [Errno 28] No space left on device\n"
    assert done.returncode == 1


def test_a_terminal_that_is_not_utf_8_gets_the_text_with_question_marks(fake_stack):
    arguments = (
        "generate",
        "Once",
        "--url",
        fake_stack.gateway_address,
        "--max-tokens",
        "300",
        "--seed",
        "1",
    )

    right = as_a_process(*arguments, PYTHONIOENCODING="utf-8")
    ascii_alone = as_a_process(*arguments, PYTHONIOENCODING="ascii")

    assert not right.stdout.isascii()
    assert (ascii_alone.returncode, ascii_alone.stdout) == (
        0,
        right.stdout.encode("ascii", "replace").decode(),
    )


def test_nobody_at_the_address_says_how_to_start_the_system():
    done = laps_sd("generate", "Once", "--url", f"127.0.0.1:{free_port()}")

    assert done.returncode == 1
    assert "`laps-sd up` starts it" in done.stderr


def test_an_unknown_request_is_not_found(fake_stack):
    done = laps_sd("explain", "s0.nothing", "--url", fake_stack.gateway_address)

    assert done.returncode == 1
    assert done.stderr.startswith("laps-sd: NOT_FOUND: ")


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_a_service_lists_its_settings(service):
    done = laps_sd(service, "--help")

    assert done.returncode == 0, done.stderr
    assert "LAPS_SD_GRPC_PORT" in done.stdout
    assert "--drain-s" in done.stdout


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("gateway", "aiohttp", "gateway"),
        ("scheduler", "redis", "scheduler"),
        ("record", "redis", "scheduler"),
    ],
)
def test_a_program_without_its_packages_names_the_extra_that_brings_them(command, package, extra, tmp_path):
    """`pip install laps-sd` alone brings the code of all services, and the packages of none."""
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
    (tmp_path / f"{package}.py").write_text(missing)

    done = as_a_process(command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    assert done.returncode == 1
    assert done.stderr == (
        f"laps-sd: the package {package} is not installed: pip install 'laps-sd[{extra}]', "
        "or 'laps-sd[all]' for the whole system.\n"
    )


@pytest.mark.parametrize("command", [("gateway", "--help"), ("config", "gateway")], ids=" ".join)
def test_a_module_of_the_user_in_the_current_directory_is_not_taken_for_ours(command, tmp_path):
    (tmp_path / "gateway.py").write_text("raise SystemExit('a program of the user')\n")

    done = as_a_process(*command, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "LAPS_SD_GRPC_PORT" in done.stdout


def test_a_service_shows_where_its_settings_come_from():
    done = laps_sd("scheduler", "--lease-s", "5", "--show-settings")

    assert re.search(r"^LAPS_SD_LEASE_S +5.0 s +override$", done.stdout, re.MULTILINE), done.stderr


def test_config_tells_value_unit_origin_and_meaning_of_every_setting():
    told = laps_sd("config", "scheduler", "--json", "--lease-s", "5", LAPS_SD_POLICY="fcfs")

    rows = {row["variable"]: row for row in json.loads(told.stdout)["scheduler"]}
    lease, policy, shard = (rows[f"LAPS_SD_{name}"] for name in ("LEASE_S", "POLICY", "SHARD"))
    assert (lease["value"], lease["unit"], lease["origin"]) == ("5.0", "s", "override")
    assert (policy["value"], policy["origin"]) == ("fcfs", "environment")
    assert shard["origin"] == "default"
    assert all(row["help"] for row in rows.values())
    assert set(rows) == set(
        re.findall(r"^LAPS_SD_\w+", laps_sd("scheduler", "--show-settings").stdout, re.MULTILINE)
    )


def test_config_without_a_service_tells_all_three():
    done = laps_sd("config", LAPS_SD_DRAIN_S="7")

    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"[a-z]+ *", line)] == [
        "gateway",
        "scheduler",
        "worker",
    ]
    assert len(re.findall(r"^LAPS_SD_DRAIN_S  7.0 s  \(environment\)$", done.stdout, re.MULTILINE)) == 3


def test_config_fits_a_terminal_of_80_columns():
    done = laps_sd("config", COLUMNS="80")

    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "LAPS_SD_MAX_UNACKNOWLEDGED_REPORTS  1024  (default)" in done.stdout.splitlines()


def test_config_shows_no_password():
    shown = laps_sd("config", "scheduler", LAPS_SD_REDIS_URL="rediss://user:hunter2@store:6379/0")
    as_json = laps_sd(
        "config", "scheduler", "--json", LAPS_SD_REDIS_URL="redis://h:1/0?password=hunter2&db=1"
    )

    assert "rediss://user:********@store:6379/0" in shown.stdout, shown.stderr
    assert "redis://h:1/0?password=********&db=1" in as_json.stdout, as_json.stderr
    assert "hunter2" not in shown.stdout + as_json.stdout


def test_config_says_what_is_wrong_with_a_setting():
    done = as_a_process("config", "scheduler", LAPS_SD_LEASE_S="-3")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("laps-sd scheduler: LAPS_SD_LEASE_S must be at least")


def test_config_names_a_mistyped_variable_and_the_one_that_was_meant():
    done = laps_sd("config", "gateway", "--json", LAPS_SD_LEASES="2", LAPS_SD_SLOTS="4")

    assert done.returncode == 0
    assert done.stderr == (
        "laps-sd: LAPS_SD_LEASES is not a setting of LAPS-SD and has no effect; did you mean LAPS_SD_LEASE_S?\n"
    )
    assert "LAPS_SD_SHARD" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_comes_as_a_script_and_completes(shell):
    # The shell is detected by the parent process; here no shell is found.
    script = laps_sd("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    words = {
        "bash": {"COMP_WORDS": "laps-sd wor", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "laps-sd wor"},
        "fish": {"_TYPER_COMPLETE_ARGS": "laps-sd wor", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    completed = laps_sd(_LAPS_SD_COMPLETE=f"complete_{shell}", **words[shell])

    assert "_LAPS_SD_COMPLETE" in script.stdout, script.stderr
    assert "workers" in completed.stdout, completed.stderr


def test_version_names_the_release():
    from laps_sd import __version__

    assert laps_sd("version").stdout.splitlines()[0] == f"laps-sd {__version__}"


COMMANDS = (
    "up",
    "generate",
    "chat",
    "explain",
    "queue",
    "workers",
    "drain",
    "top",
    "key",
    "config",
    "version",
    "bench",
)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS if name not in PROCESSES)])
def test_every_command_knows_its_version(command):
    from laps_sd import __version__

    done = laps_sd(*command, "--version")

    assert (done.returncode, done.stdout) == (0, f"laps-sd {__version__}\n"), done.stderr


@pytest.mark.parametrize("program", PROCESSES)
def test_a_program_that_the_command_becomes_knows_its_version(program):
    from laps_sd import __version__

    done = as_a_process(program, "--version")

    assert (done.returncode, done.stdout) == (0, f"laps-sd {__version__}\n"), done.stderr


def test_help_has_the_flags_in_groups():
    up, generate, worker = (laps_sd(name, "--help").stdout for name in ("up", "generate", "worker"))

    assert [
        title for title in ("Models", "System", "Addresses and data", "Terminal") if f"─ {title} ─" in up
    ] == [
        "Models",
        "System",
        "Addresses and data",
        "Terminal",
    ]
    assert "─ Connection ─" in generate and "─ Sampling ─" in generate
    titles = re.findall(r"^(\w.*):$", worker, re.MULTILINE)
    assert titles[:3] == ["Options", "Worker", "Models"]
    assert titles.index("Engine fake") < titles.index("TLS of the listener")


@pytest.mark.parametrize("name", ["", "a b", "../etc", "[x]", "a\nkeys = []", "x" * 65, "-x"])
def test_a_key_is_made_for_names_that_gateways_accept(name):
    from gateway.tenant_file import KeyFile

    refused = laps_sd("key", "--", name)
    made = laps_sd("key", "acme.eu-1")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "letters, digits and . _ -" in " ".join(refused.stderr.split())
    entry = made.stderr.partition("\n")[2]
    assert set(KeyFile.parse(entry).tenants.values()) == {"acme.eu-1"}


def test_a_key_for_calls_without_a_key_is_refused():
    assert laps_sd("key", "anonymous").returncode == 2


def test_a_target_is_named_once():
    done = laps_sd("up", "/nowhere", "--target", "/elsewhere")

    assert "MODEL and --target are the same: give /nowhere or /elsewhere, not both" in done.stderr
    assert done.returncode == 1


def test_a_model_of_the_hub_that_is_not_here_is_said_before_anything_starts(tmp_path):
    done = laps_sd("up", "acme/large", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))

    assert done.returncode == 1
    assert "`hf download acme/large` downloads it" in done.stderr
    assert "ready" not in done.stderr


def test_a_draft_of_another_tokenizer_is_refused_before_anything_starts(tmp_path):
    target = ROOT / "worker_svc" / "demo" / "target"
    draft = shutil.copytree(ROOT / "worker_svc" / "demo" / "draft", tmp_path / "draft")
    body = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.get)
    body["model"]["vocab"] = dict(zip(words, [*range(7), *range(len(words) - 1, 6, -1)], strict=True))
    (draft / "tokenizer.json").write_text(json.dumps(body))

    done = laps_sd("up", str(target), "--draft", str(draft))

    assert done.returncode == 1
    assert f"--draft {draft} does not fit: target and draft have different tokenizers" in done.stderr
    assert re.search(r"the first that differs is id \d+: '.*' in the target, '.*' in the draft", done.stderr)
    assert "ready" not in done.stderr


def test_bench_lists_the_files_that_are_programs_by_the_names_that_pages_use(tmp_path):
    (tmp_path / "laps_sd" / "cli").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "draft_lengths.py").write_text('if __name__ == "__main__":\n    print("ran")\n')
    (tmp_path / "bench" / "report.py").write_text("def table():\n    pass\n")

    listed = as_a_process("bench", cwd=tmp_path)
    helper = as_a_process("bench", "report", cwd=tmp_path)

    assert listed.stdout.splitlines()[-1] == "Benchmarks: draft-lengths"
    assert (helper.returncode, helper.stdout) == (1, "")
    assert "There is no benchmark 'report'; there are: draft-lengths." in helper.stderr


def test_bench_runs_a_file_of_the_checkout_with_the_remaining_arguments(tmp_path):
    """A benchmark of the gateway does not hide the gateway from the others."""
    (tmp_path / "laps_sd" / "cli").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "gateway.py").touch()
    (tmp_path / "bench" / "hello_world.py").write_text(
        'if __name__ == "__main__":\n    import sys; import gateway.calls; print(sys.argv[1:]); sys.exit(3)\n'
    )

    done = as_a_process("bench", "hello-world", "--json", "x", cwd=tmp_path)

    assert (done.stdout, done.returncode) == ("['--json', 'x']\n", 3), done.stderr
