"""The name of a shard, which gateways issue with each request id and schedulers put in each key of the record."""

from __future__ import annotations

import re

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
SHARD_NAME_RULE = "1 to 63 letters, digits, - and _, the first a letter or a digit"
"""Names that match SHARD_NAME, in words."""
