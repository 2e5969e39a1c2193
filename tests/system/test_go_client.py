"""The Go client against real gateways: its own tests, compiled with the Go packages of Debian 12 (clients/go/install_tools.sh)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from laps_sd.service.keys import digest_of, new_key
from laps_sd.service.wire import Tls
from laps_sd.stack.local import LocalStack
from tests.certificates import write_certificates
from tests.conftest import StackMaker

PACKAGE = Path(__file__).parents[2] / "clients" / "go"
SOURCES = Path("/usr/share/gocode")


@pytest.fixture(scope="module")
def gopath(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which Go finds the package. Skip the test where Go or its gRPC is not installed."""
    if shutil.which("go") is None or not (SOURCES / "src" / "google.golang.org" / "grpc").is_dir():
        pytest.skip("Go or its gRPC is not installed: clients/go/install_tools.sh")
    folder = tmp_path_factory.mktemp("go")
    (folder / "src").mkdir()
    (folder / "src" / "lapssd").symlink_to(PACKAGE, target_is_directory=True)
    return folder


def go(gopath: Path, *arguments: str | Path) -> None:
    run("go", *arguments, cwd=gopath / "src" / "lapssd", GO111MODULE="off", GOPATH=f"{gopath}:{SOURCES}")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its output. Fail with the output if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment, "PWD": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def tests(gopath: Path) -> Path:
    """Return the compiled tests. The first compilation of gRPC takes a minute."""
    program = gopath / "lapssd.test"
    go(gopath, "test", "-c", "-o", program, ".")
    return program


def run_tests(program: Path, names: str, stack: LocalStack | None = None, **environment: str) -> None:
    """Run the tests of these names against the gateways of a stack; none may be skipped."""
    gateways = ",".join(stack.gateway_addresses) if stack else ""
    output = run(
        program,
        "-test.v",
        f"-test.run=^({names})$",
        cwd=PACKAGE,
        LAPS_SD_TEST_GATEWAYS=gateways,
        **environment,
    )
    assert re.search(r"^--- PASS: ", output, re.MULTILINE) and "--- SKIP" not in output, output


pytestmark = pytest.mark.timeout(900)


def test_the_code_is_formatted_and_vetted(gopath: Path) -> None:
    go(gopath, "vet", ".", "./lapssdv1", "./example")
    assert run("gofmt", "-l", ".", cwd=PACKAGE) == ""


def test_calls_are_repeated_and_streams_go_on_by_the_rules_of_the_python_client(tests: Path) -> None:
    rules = re.findall(
        r"^func (Test\w+)", (PACKAGE / "repair_test.go").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rules) > 8
    run_tests(tests, "|".join(rules))


def test_each_call_works(tests: Path, fake_stack: LocalStack) -> None:
    run_tests(tests, "TestCalls", fake_stack)


def test_streams_go_on_at_another_gateway_when_theirs_is_killed(tests: Path, make_stack: StackMaker) -> None:
    stack = make_stack(workers=2, gateways=2)
    name = "TestAKilledGatewayCostsAPauseAndNoTokenIsLostOrComesTwice"
    run_tests(tests, name, stack, LAPS_SD_TEST_PID=str(stack.children["gateway-0"].pid))


def test_tls_and_api_keys_are_used(tests: Path, make_stack: StackMaker, tmp_path: Path) -> None:
    folder = write_certificates(tmp_path / "tls")
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.go]\nkeys = ["{digest_of(key)}"]\n')
    tls = Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")
    stack = make_stack(tls=tls, environment={"LAPS_SD_API_KEYS_FILE": str(keys)})

    run_tests(tests, "TestTLSAndAPIKeys", stack, LAPS_SD_TEST_TLS=str(folder), LAPS_SD_TEST_KEY=key)


def test_the_example_prints_a_stream(gopath: Path, fake_stack: LocalStack) -> None:
    program = gopath / "example"
    go(gopath, "build", "-o", program, "./example")
    arguments = ("-gateways", fake_stack.gateway_address, "-max-tokens", "12", "Once upon a time")
    printed = run(program, *arguments, cwd=gopath)

    assert re.search(r"(?s).\n-- (LENGTH|STOP), \d+ tokens, \d+ of \d+ draft tokens accepted\n$", printed), (
        printed
    )
