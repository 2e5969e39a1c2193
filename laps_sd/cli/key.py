"""`laps-sd key`: an API key for a tenant, and what the gateways' file needs of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from laps_sd.service.keys import digest_of, new_key


def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant: letters, digits and . _ -")],
) -> None:
    """Make an API key: the key on stdout, once; the entry for LAPS_SD_API_KEYS_FILE on stderr."""
    made = new_key()
    print(made)
    print(
        f"# {made[:12]}…: add this to the file that LAPS_SD_API_KEYS_FILE names (of a known tenant, the key only)\n"
        f"[tenants.{tenant}]\n"
        f'keys = ["{digest_of(made)}"]',
        file=sys.stderr,
    )
