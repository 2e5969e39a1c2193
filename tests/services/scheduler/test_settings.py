"""What no single setting of a scheduler can check."""

from __future__ import annotations

import pytest

from laps_sd.config import ConfigError, load
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
            "LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE must be a file, and /none is none",
        ),
    ],
)
def test_a_wrong_setting_for_sentinels_is_a_sentence(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SchedulerSettings, {}, environ=environ)

    assert said in str(refused.value)
