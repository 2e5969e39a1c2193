"""Worker and gateway of the release before, as its tag has them, work with the scheduler of this tree.

A scheduler is updated first, so every release meets older peers. Against any other revision:

    make test ARGS="tests/system/test_release_before.py --before HEAD~5"
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from tests.conftest import StackMaker

ROOT = Path(__file__).parents[2]
PEERS = ("gateway-0", "worker-0")


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")


def tag_before() -> str:
    """Return the newest release before this tree; a tag on this very commit is this release."""
    found = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    if found.returncode:
        pytest.skip("no release before this one: no tag v* among the ancestors of this checkout")
    return found.stdout.decode().strip()


def unpacked(revision: str, folder: Path) -> Path:
    """Return the tree of a revision."""
    archive = git("archive", "--format=tar", revision)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def run_from(tree: Path, stack: LocalStack, name: str) -> None:
    """Restart a component with the code of another tree."""
    child = stack.children[name]
    # SAFEPATH: without it the working folder of the tests would come before PYTHONPATH.
    child.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    asked = [
        sys.executable,
        "-c",
        f"import {child.module}, laps_sd; print({child.module}.__file__, laps_sd.__file__)",
    ]
    found = subprocess.run(asked, env=child.environment, capture_output=True, text=True, check=True).stdout
    assert [Path(file).is_relative_to(tree) for file in found.split()] == [True, True], found
    stack.restart(name)


def old_peers_are_served(revision: str, tree: Path, make_stack: StackMaker) -> None:
    stack = make_stack()
    for name in PEERS:
        run_from(unpacked(revision, tree), stack, name)

    with Client(stack.gateway_address) as client:
        answers = [client.generate("Once", seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]
        told = client.explain(answers[0].accepted.request_id)

    for answer in answers:
        assert answer.end.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(answer.token_ids) == answer.end.usage.completion_tokens == 40
        assert answer.text
    assert [line.what for line in told.story][-1] == "ended"


def test_the_release_before_is_served(
    request: pytest.FixtureRequest, tmp_path: Path, make_stack: StackMaker
) -> None:
    old_peers_are_served(request.config.getoption("--before") or tag_before(), tmp_path, make_stack)


@pytest.mark.long
def test_the_last_commit_is_served(tmp_path: Path, make_stack: StackMaker) -> None:
    """Keep the test above working while there is no tag; fail where a change and its commit are not
    compatible.
    """
    if git("rev-parse", "--verify", "HEAD").returncode:
        pytest.skip("not a git checkout")
    old_peers_are_served("HEAD", tmp_path, make_stack)
