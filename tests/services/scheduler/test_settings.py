"""Checks of a scheduler's settings that need more than one setting."""

from __future__ import annotations

import pytest

from laps_sd.service.config import ConfigError, load
from scheduler_svc.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE": __file__},
            "needs a LAPS_SD_REDIS_URL that begins with redis+sentinel",
        ),
        (
            {"LAPS_SD_REDIS_SENTINEL_USER": "asker", "LAPS_SD_REDIS_URL": "redis+sentinel://s/main"},
            "LAPS_SD_REDIS_SENTINEL_USER needs LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE",
        ),
        (
            {"LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE": "/none", "LAPS_SD_REDIS_URL": "redis+sentinel://s/main"},
            "LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE must name a file; /none is not a file",
        ),
    ],
)
def test_a_wrong_setting_for_sentinels_is_a_sentence(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SchedulerSettings, {}, environ=environ)

    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "stranger"),
    [
        ({}, False),
        ({"LAPS_SD_GRPC_HOST": "localhost"}, False),
        ({"LAPS_SD_GRPC_HOST": "::1"}, False),
        ({"LAPS_SD_GRPC_HOST": "0.0.0.0"}, True),
        ({"LAPS_SD_GRPC_HOST": "scheduler.prod"}, True),
        ({"LAPS_SD_GRPC_HOST": "0.0.0.0", "LAPS_SD_TLS_CERT": "c", "LAPS_SD_TLS_KEY": "k"}, True),
        (
            {
                "LAPS_SD_GRPC_HOST": "0.0.0.0",
                "LAPS_SD_TLS_CERT": "c",
                "LAPS_SD_TLS_KEY": "k",
                "LAPS_SD_TLS_CLIENT_CA": "ca",
            },
            False,
        ),
    ],
)
def test_a_port_that_other_machines_reach_without_a_certificate_is_open_to_strangers(
    environ: dict[str, str], stranger: bool
) -> None:
    assert load(SchedulerSettings, {}, environ=environ).open_to_strangers is stranger
