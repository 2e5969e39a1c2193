"""Metrics of the scheduler inside vLLM's engine process.

vLLM serves `/metrics` from another process, its API server. `laps_vllm.metrics_page` brings these metrics
there: by a file that `Publisher` writes, or, where `PROMETHEUS_MULTIPROC_DIR` is set (several API servers),
by prometheus_client itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile

from laps_vllm.metrics_page import file_of, folder, remove_dead

__all__ = ["PUBLISH_S", "Metrics", "Publisher"]

PUBLISH_S = 5.0
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
DECISION_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class Metrics:
    """All metrics of one engine; the label `engine` is its data-parallel rank, as in vLLM's own metrics."""

    def __init__(self, engine: int, registry: CollectorRegistry) -> None:
        self.registry = registry
        own = {"engine": str(engine)}

        self.queue_depth = Gauge(
            "laps_sd_vllm_queue_depth",
            "Requests that wait or are paused, by level (0: the shortest).",
            ("engine", "level"),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.paused_now = Gauge(
            "laps_sd_vllm_paused",
            "Requests that are paused with their KV kept.",
            ("engine",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        ).labels(**own)
        preemptions = Counter(
            "laps_sd_vllm_preemptions",
            "Requests paused for a better one (pause), and those whose KV was freed for others (evict).",
            ("engine", "kind"),
            registry=registry,
        )
        self.pauses = preemptions.labels(kind="pause", **own)
        self.evictions = preemptions.labels(kind="evict", **own)
        self.estimate_error = Histogram(
            "laps_sd_vllm_estimate_error_ratio",
            "Service after an estimate, over what was estimated, of requests that ended; by moment and basis.",
            ("engine", "moment", "basis"),
            buckets=RATIOS,
            registry=registry,
        )
        self.estimates_covered = Counter(
            "laps_sd_vllm_estimates_covered",
            "Estimates whose interval contained the service afterwards, of requests that ended.",
            ("engine", "moment", "basis"),
            registry=registry,
        )
        self.decision_s = Histogram(
            "laps_sd_vllm_decision_seconds",
            "Time to decide who is in a step: the core and choose.",
            ("engine",),
            buckets=DECISION_S,
            registry=registry,
        ).labels(**own)
        self.ignored_hints = Counter(
            "laps_sd_vllm_ignored_hints",
            "Hints out of bounds.",
            ("engine", "hint"),
            registry=registry,
        )
        self.engine = str(engine)


class Publisher:
    """Makes the metrics visible on vLLM's page, in a thread that runs every `PUBLISH_S` seconds."""

    def __init__(self, engine: int, *, each_time: Callable[[], None]) -> None:
        """`each_time` is called in the thread as well, and raises nothing."""
        shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self.metrics = Metrics(engine, REGISTRY if shared else CollectorRegistry())
        self._file = None if shared else file_of(folder(), os.getppid(), os.getpid(), engine)
        self._each_time = each_time
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="laps-sd-publisher", daemon=True).start()

    def _run(self) -> None:
        self.publish()
        if self._file is not None:
            with contextlib.suppress(OSError):
                remove_dead(self._file.parent)
        while not self._stop.wait(PUBLISH_S):
            self.publish()
            self._each_time()

    def publish(self) -> None:
        """Write the metrics now. A folder that cannot be written costs nothing but the metrics."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_to_textfile(str(self._file), self.metrics.registry)

    def close(self) -> None:
        """Stop, and remove the file."""
        self._stop.set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
