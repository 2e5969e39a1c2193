"""The same check as `test_bad_input.py`, for the gateway's HTTP port instead of gRPC: every input is
answered, and other clients are not affected.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from laps_sd.stack.local import LocalStack
from tests.system.hostile_http import Generator, send_all_over
from tests.system.tally import Tally
from tests.system.test_bad_input import LONG_GROWTH_MIB, LONG_INPUTS, SHORT_GROWTH_MIB, fuzzed_stack
from tests.system.watch import Watch, check_queue_empties, undisturbed

SHORT_INPUTS = 1_000
WARM_UP_INPUTS = 700
"""Two large ones among them."""


async def fuzz(stack: LocalStack, count: int, *, seed: int) -> tuple[Tally, Watch]:
    """Send this many inputs to the HTTP port, with other clients on gRPC; return the tally, and a watch from
    after the warm-up.
    """
    url = urlsplit(stack.http_url)
    assert url.hostname is not None and url.port is not None
    async with undisturbed(stack):
        await send_all_over(url.hostname, url.port, Generator(seed + 1).inputs(WARM_UP_INPUTS))
        watch = Watch.over(stack)
        tally = await send_all_over(url.hostname, url.port, Generator(seed).inputs(count))
    await check_queue_empties(stack)
    return tally, watch


@pytest.mark.parametrize(
    ("count", "most_mib"),
    [
        (SHORT_INPUTS, SHORT_GROWTH_MIB),
        pytest.param(LONG_INPUTS, LONG_GROWTH_MIB, marks=pytest.mark.long, id="long"),
    ],
)
async def test_every_bad_request_is_answered_by_name_and_nobody_beside_it_notices(
    count: int, most_mib: float
) -> None:
    with fuzzed_stack() as stack:
        tally, watch = await fuzz(stack, count, seed=count)
        watch.check(tally, count=count, most_mib=most_mib)
