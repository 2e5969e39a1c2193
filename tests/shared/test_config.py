"""Settings: the source of a value, and the error for a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from laps_sd.service.config import (
    ConfigError,
    Settings,
    environment,
    field,
    load,
    provenance,
    unknown,
    unknown_sentences,
)
from laps_sd.service.flags import options
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.wire import LinkSettings


@dataclass(frozen=True, kw_only=True)
class Sample(Settings):
    """Every type that a setting can have."""

    lease_s: float = field(2.0, help="Lease.", minimum=0.1, maximum=60)
    slots: int = field(8, help="Slots.", minimum=1)
    keep_s: float = field(5.0, help="Keep.", minimum=0.0)
    seeds: tuple[str, ...] = field(("127.0.0.1:50052",), help="Seeds.")
    style: Literal["json", "console"] = field("json", help="Style.")
    folder: Path | None = field(None, help="Folder.")
    verbose: bool = field(False, help="Verbose.")
    limit: int | None = field(5, help="Limit.", minimum=0)
    token: str = field("", help="Token.", secret=True)

    @property
    def renew_s(self) -> float:
        return self.lease_s / 3

    def problems(self) -> Iterator[str]:
        if self.style == "console" and self.slots > 100:
            yield "LAPS_SD_SLOTS must be at most 100 with LAPS_SD_STYLE=console."


def test_overrides_win_over_the_environment_and_that_over_defaults():
    environ = {"LAPS_SD_LEASE_S": "3", "LAPS_SD_SLOTS": "4"}

    settings = load(Sample, {"slots": 2, "style": None}, environ)

    assert (settings.lease_s, settings.slots, settings.style, settings.renew_s) == (3.0, 2, "json", 1.0)


def test_text_becomes_the_type_of_the_field():
    settings = load(
        Sample,
        environ={
            "LAPS_SD_SEEDS": "a:1, b:2",
            "LAPS_SD_FOLDER": "/srv/x",
            "LAPS_SD_VERBOSE": "yes",
            "LAPS_SD_LIMIT": "",
            "LAPS_SD_STYLE": "console",
        },
    )

    assert settings.seeds == ("a:1", "b:2")
    assert settings.folder == Path("/srv/x")
    assert settings.verbose is True
    assert settings.limit is None
    assert settings.style == "console"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("LEASE_S", "-3", "LAPS_SD_LEASE_S must be at least 0.1 s, got -3.0."),
        ("LEASE_S", "61", "LAPS_SD_LEASE_S must be at most 60 s, got 61.0."),
        ("LEASE_S", "nan", "LAPS_SD_LEASE_S must be a number, got nan."),
        ("LEASE_S", "inf", "LAPS_SD_LEASE_S must be at most 60 s, got inf."),
        ("KEEP_S", "inf", "LAPS_SD_KEEP_S must be finite, got inf."),
        ("LEASE_S", "soon", "LAPS_SD_LEASE_S must be a number, got 'soon'."),
        ("SLOTS", "1.5", "LAPS_SD_SLOTS must be a whole number, got '1.5'."),
        ("STYLE", "xml", "LAPS_SD_STYLE must be one of json, console, got 'xml'."),
        ("VERBOSE", "maybe", "LAPS_SD_VERBOSE must be true or false, got 'maybe'."),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_its_variable(name, text, sentence):
    with pytest.raises(ConfigError) as caught:
        load(Sample, environ={"LAPS_SD_" + name: text})

    assert caught.value.problems == (sentence,)


def test_all_problems_are_said_at_once():
    with pytest.raises(ConfigError) as caught:
        Sample(lease_s=0, slots=0)

    assert len(caught.value.problems) == 2


def test_a_value_that_cannot_be_read_and_one_out_of_bounds_are_said_at_once():
    with pytest.raises(ConfigError) as caught:
        load(Sample, environ={"LAPS_SD_SLOTS": "many", "LAPS_SD_LEASE_S": "0"})

    assert sorted(problem.partition(" must be ")[0] for problem in caught.value.problems) == [
        "LAPS_SD_LEASE_S",
        "LAPS_SD_SLOTS",
    ]


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="There is no setting named slotz"):
        load(Sample, {"slotz": 1}, {})


def test_what_no_field_can_check_alone_is_checked():
    with pytest.raises(ConfigError, match="at most 100 with LAPS_SD_STYLE=console"):
        Sample(slots=101, style="console")


def test_provenance_tells_the_origin_and_hides_secrets():
    rows = {
        row.name: row
        for row in provenance(Sample, {"slots": 2}, {"LAPS_SD_TOKEN": "hush", "LAPS_SD_LEASE_S": "3"})
    }

    assert {name: row.origin for name, row in rows.items() if row.origin != "default"} == {
        "lease_s": "environment",
        "slots": "override",
        "token": "environment",
    }
    assert (rows["token"].value, rows["lease_s"].value, rows["lease_s"].unit) == ("********", "3.0", "s")
    assert "hush" not in repr(load(Sample, {"token": "hush"}, {}))


def test_settings_survive_the_way_through_an_environment():
    settings = Sample(lease_s=7.5, seeds=("a:1", "b:2"), folder=Path("/x"), verbose=True, limit=None)

    assert load(Sample, environ=environment(settings)) == settings


def test_every_field_is_a_flag_except_secrets():
    app = typer.Typer()
    seen = []

    @app.command()
    @options(Sample)
    def command(**overrides):
        seen.append(load(Sample, overrides, {}))

    result = CliRunner().invoke(app, ["--lease-s", "5", "--seeds", "a:1,b:2", "--verbose", "--folder", "/x"])

    assert result.exit_code == 0, result.output
    assert seen == [Sample(lease_s=5, seeds=("a:1", "b:2"), verbose=True, folder=Path("/x"))]
    assert CliRunner().invoke(app, ["--token", "x"]).exit_code == 2


@pytest.mark.parametrize("text", ["", "none", "None"])
def test_none_is_a_value_of_settings_that_may_have_none_by_variable_and_by_flag(text):
    environ = {"LAPS_SD_LIMIT": text, "LAPS_SD_FOLDER": text}
    app = typer.Typer()
    seen = [load(Sample, environ=environ)]

    @app.command()
    @options(Sample)
    def command(**overrides):
        seen.append(load(Sample, overrides, {"LAPS_SD_FOLDER": "/x"}))

    result = CliRunner().invoke(app, ["--limit", text, "--folder", text])

    assert result.exit_code == 0, result.output
    assert [(settings.limit, settings.folder) for settings in seen] == [(None, None)] * 2
    with pytest.raises(ConfigError, match="LAPS_SD_SLOTS must be a whole number, got"):
        load(Sample, environ={"LAPS_SD_SLOTS": text})


@pytest.mark.parametrize("kind", [ServingSettings, LinkSettings])
def test_every_shared_setting_says_what_it_means(kind):
    assert all(f.metadata["help"] for f in dataclasses.fields(kind))


def test_certificate_and_key_come_together():
    with pytest.raises(ConfigError, match="must be set together"):
        ServingSettings(tls_cert=Path("cert.pem"))


def test_a_mistyped_variable_is_named_with_the_one_that_was_meant():
    environ = {"LAPS_SD_LEASES": "3", "LAPS_SD_policy": "fcfs", "LAPS_SD_QQQQ": "1", "LAPS_SD_LEASE_S": "3"}

    assert unknown(environ) == {
        "LAPS_SD_LEASES": "LAPS_SD_LEASE_S",
        "LAPS_SD_QQQQ": None,
        "LAPS_SD_policy": "LAPS_SD_POLICY",
    }
    first, second, _ = unknown_sentences(environ)
    assert first.startswith("LAPS_SD_LEASES is not a setting") and "did you mean LAPS_SD_LEASE_S?" in first
    assert second.startswith("LAPS_SD_QQQQ is not a setting") and "`laps-sd config` lists" in second


def test_what_only_another_program_of_the_project_reads_is_no_mistake():
    environ = dict.fromkeys(
        (
            "LAPS_SD_BENCH_DATA",
            "LAPS_SD_URL",
            "LAPS_SD_FAKE_ROUND_S",
            "LAPS_SD_LEASE_S",
            "LAPS_SD_OPERATOR_NAMESPACE",
        ),
        "",
    )

    assert unknown(environ | {"PATH": "/bin"}) == {}


def test_what_kubernetes_says_of_its_services_is_no_mistake():
    environ = {
        "LAPS_SD_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "LAPS_SD_GATEWAY_SERVICE_PORT_GRPC": "50051",
        "LAPS_SD_GATEWAY_PORT": "tcp://10.0.0.1:50051",
        "LAPS_SD_GATEWAY_PORT_50051_TCP_ADDR": "10.0.0.1",
    }

    assert unknown(environ) == {}
    assert list(unknown({"LAPS_SD_METRIC_PORT": "1"} | environ)) == ["LAPS_SD_METRIC_PORT"]
