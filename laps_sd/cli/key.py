"""`laps-sd key`: an API key for a tenant, and its entry in the gateways' file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from laps_sd.service.keys import digest_of, new_key


def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant: letters, digits and . _ -")],
) -> None:
    """Create an API key. It is printed once, on stdout; its entry for LAPS_SD_API_KEYS_FILE on stderr."""
    made = new_key()
    print(made)
    print(
        f"# {made[:12]}…: add this to the file LAPS_SD_API_KEYS_FILE (for an existing tenant, only the key)\n"
        f"[tenants.{tenant}]\n"
        f'keys = ["{digest_of(made)}"]',
        file=sys.stderr,
    )
