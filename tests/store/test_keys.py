"""Keys are built in one place, cannot be confused with one another, and carry the shard as their hash tag."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from scheduler_svc.store import scripts
from scheduler_svc.store.keys import Keys
from scheduler_svc.store.scripts import Script


def test_the_hash_tag_is_the_shard_whatever_follows() -> None:
    keys = Keys("main-eu_1")
    built = [keys.leader(), keys.log(), keys.request("{x}"), keys.idempotency("{t}", "{k}:{l}")]

    assert {"main-eu_1"} == {re.search(r"\{(.*?)\}", key).group(1) for key in built}  # type: ignore[union-attr]
    assert all(key.startswith("laps-sd:{main-eu_1}:") for key in built)


@pytest.mark.parametrize("shard", ["", "a.b", "_a", "a}b", "a:b", "a b", "-a", "a" * 64, "ä"])
def test_a_shard_name_that_would_break_the_keys_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match="shard"):
        Keys(shard)


def test_no_two_idempotency_entries_share_a_key() -> None:
    keys = Keys("main")
    pairs = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("", "a:b:c"), ("a", "b%3Ac")]

    assert len(pairs) == len({keys.idempotency(*pair) for pair in pairs})


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.name)
def test_scripts_take_time_and_keys_from_their_caller(script: Script) -> None:
    called = set(re.findall(r"redis\.p?call\('(\w+)'", script.source))

    assert not called & {"TIME", "KEYS", "SCAN", "RANDOMKEY"}
    assert "laps-sd" not in script.source


def test_every_script_file_is_a_transition() -> None:
    files = {file.name for file in resources.files("scheduler_svc.store").joinpath("lua").iterdir()}

    assert files == {f"{script.name}.lua" for script in scripts.ALL} | {"_common.lua"}
