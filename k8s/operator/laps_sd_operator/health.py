"""HTTP endpoints for Kubernetes' probes.

`/healthz`: 200 while the operator watches and its turns end, else 503; a JSON object with the ages in seconds. For the
readiness probe: an operator that lost the API server is not ready, and a restart would not help it.
`/livez`: 200 while the process answers.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from laps_sd.errors import StartupError
from laps_sd_operator.operator import HEALTHY_S, Operator

PORT = "LAPS_SD_OPERATOR_HEALTH_PORT"


def health_of(operator: Operator) -> dict[str, Any]:
    """Return the content of `/healthz`; `problem` is empty if the operator is healthy."""
    watches, turns = operator.ages_s(), operator.turn_ages_s()
    problems = [
        f"{kind} were never listed" if age_s is None else f"no sign of the watch of {kind} for {age_s:.0f} s"
        for kind, age_s in watches.items()
        if age_s is None or age_s > HEALTHY_S
    ]
    problems += [
        f"no turn of {name} ended for {age_s:.0f} s" for name, age_s in turns.items() if age_s > HEALTHY_S
    ]
    return {
        "problem": "; ".join(problems),
        "leads": operator.leads,
        "watch_age_s": {kind: age_s and round(age_s, 1) for kind, age_s in watches.items()},
        "turn_age_s": {name: round(age_s, 1) for name, age_s in turns.items()},
    }


def application_of(operator: Operator) -> web.Application:
    """Return the application with both endpoints."""

    async def healthz(_: web.Request) -> web.Response:
        found = health_of(operator)
        return web.json_response(found, status=503 if found["problem"] else 200)

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    found = web.Application()
    found.router.add_get("/healthz", healthz)
    found.router.add_get("/livez", livez)
    return found


async def serve_health(operator: Operator, port: int) -> web.AppRunner:
    """Serve the endpoints on every address. Raises StartupError if the port is taken."""
    runner = web.AppRunner(application_of(operator), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
    except OSError as error:
        await runner.cleanup()
        message = f"The health port {port} cannot be opened: {error.strerror}; choose another with {PORT}."
        raise StartupError(message) from error
    return runner
