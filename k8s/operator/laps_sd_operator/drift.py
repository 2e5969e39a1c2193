"""Changes of a pool's Deployment by others: found by comparison with what the API server would make of the pool.

Field by field the Deployment differs from the pool anyhow, because the API server completes and rewrites what it
gets (defaults, `1000m` to `1`). Therefore the operator sends its own patch as a dry run and compares the answer with
the Deployment. It does so once for each generation of the Deployment.

A difference is mended, at most once in MEND_EVERY_S: every mend replaces the workers, and another writer that insists
would have them replaced forever. In between the difference is a problem. The annotation by which `kubectl rollout
restart` replaces pods is no difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from laps_sd_operator import objects
from laps_sd_operator.kubernetes import FIELD_MANAGER, Kubernetes
from laps_sd_operator.objects import Object
from laps_sd_operator.problems import Problem, Reason

MEND_EVERY_S = 600.0
MAX_NAMED = 3
"""Largest number of fields that a message names."""
OF_KUBERNETES = (FIELD_MANAGER, "kube-controller-manager")


class Drift:
    """Knowledge about the Deployment of one pool. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compared: tuple[str, ...] = ()
        self._mended_s: float | None = None
        self._problem: Problem | None = None

    def is_compared(self, pool: Object, deployment: Object | None) -> bool:
        """Return whether nothing has changed since the last comparison, and a known difference may not be mended."""
        if deployment is None or not objects.owns(pool, deployment):
            return True
        return self._compared == _state(pool, deployment) and not (self._problem and self._may_mend())

    async def find(self, kubernetes: Kubernetes, pool: Object, deployment: Object) -> str:
        """Return what another writer changed and the operator has to mend; empty if there is nothing to do.

        Raises ApiException, also where the API server refuses the pool's template.
        """
        if self.is_compared(pool, deployment):
            return ""
        made = await kubernetes.patch_deployment(objects.template_patch(pool, deployment), dry_run=True)
        fields = list(differences(_shaped(made), _shaped(deployment), "spec"))
        self._compared, self._problem = _state(pool, deployment), None
        if not fields:
            return ""
        named = ", ".join(fields[:MAX_NAMED]) + (", …" if len(fields) > MAX_NAMED else "")
        by = _writer(deployment)
        message = f"{named} of the Deployment was changed" + (f" by {by}" if by else "")
        if not self._may_mend():
            limit = f"it is mended once in {MEND_EVERY_S:.0f} s, as this replaces workers: change the pool instead"
            self._problem = Problem(Reason.CHANGED, f"{message}; {limit}")
            return ""
        return message

    def mended(self) -> None:
        """Note that the difference that `find` returned was mended."""
        self._mended_s, self._problem = self._clock(), None

    def problem(self) -> Problem | None:
        """Return the difference that is not mended yet."""
        return self._problem

    def _may_mend(self) -> bool:
        return self._mended_s is None or self._clock() >= self._mended_s + MEND_EVERY_S


def differences(wanted: Any, found: Any, path: str) -> Iterator[str]:
    """Yield the paths at which `found` differs from `wanted`."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in sorted(wanted.keys() | found.keys()):
            yield from differences(wanted.get(name), found.get(name), f"{path}.{name}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, pair in enumerate(zip(wanted, found, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif wanted != found:
        yield path


def _state(pool: Object, deployment: Object) -> tuple[str, ...]:
    metadata = deployment["metadata"]
    return metadata["uid"], str(metadata.get("generation")), objects.digest(pool)


def _shaped(deployment: Object) -> dict[str, Any]:
    """Return what the operator decides of a Deployment, in a form that can be compared."""
    spec: dict[str, Any] = json.loads(
        json.dumps({name: deployment["spec"].get(name) for name in ("template", "strategy")})
    )
    metadata = spec["template"].get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    annotations.pop(objects.RESTARTED, None)
    spec["template"]["metadata"] = {"labels": metadata.get("labels") or {}, "annotations": annotations}
    return spec


def _writer(deployment: Object) -> str:
    """Return the last manager of the Deployment's fields besides the operator and Kubernetes; empty: unknown."""
    entries = [
        (one.get("time", ""), one.get("manager", ""))
        for one in deployment["metadata"].get("managedFields") or ()
        if not one.get("subresource") and one.get("manager") not in OF_KUBERNETES
    ]
    return max(entries, default=("", ""))[1]
