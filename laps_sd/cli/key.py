"""`laps-sd key`: an API key for a tenant, and its entry in the gateways' file."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from laps_sd.service.keys import ANONYMOUS, digest_of, new_key, tenant_name_problem


def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant: letters, digits and . _ -")],
) -> None:
    """Create an API key. It is printed once, on stdout; its entry for LAPS_SD_API_KEYS_FILE on stderr."""
    if problem := tenant_name_problem(tenant):
        raise typer.BadParameter(f"the tenant's name {problem}, got {tenant[:80]!r}", param_hint="TENANT")
    if tenant == ANONYMOUS:
        raise typer.BadParameter(
            f"{ANONYMOUS!r} is the tenant of calls without a key, and has none", param_hint="TENANT"
        )
    made = new_key()
    print(made)
    print(
        f"# {made[:12]}…: add this to the file LAPS_SD_API_KEYS_FILE (for an existing tenant, only the key)\n"
        # A dot in a bare key of TOML would begin a table inside.
        f"[tenants.{json.dumps(tenant) if '.' in tenant else tenant}]\n"
        f'keys = ["{digest_of(made)}"]',
        file=sys.stderr,
    )
