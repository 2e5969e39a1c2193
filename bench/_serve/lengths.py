"""What the scheduler knows of the lengths of the measured requests before they run."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench._serve.workloads import Workload
from bench._serve_stack import make_jobs, priors_of
from bench.lengths import Estimated, figures
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.estimates.sources import Guesses


def lengths_row(
    loads: Sequence[Workload], kinds: Sequence[str], warm_up: Sequence[pb.GenerateRequest]
) -> dict[str, Any]:
    """Return how well the priors of a run's start estimate the lengths of its requests: Kendall's tau, root
    mean square error of ln(length), share of lengths in the 80 % interval, and the share of the variance of
    ln(length) that the estimates explain; beside it the share that the kinds of the prompts would explain if
    they were known. `loads`: those of one case, all seeds; `kinds`: of all their requests, in order.
    """
    found = [each for load in loads for each in estimates(load)]
    logs = [math.log(each.length) for each in found]
    spread = statistics.pstdev(logs)
    of_kinds: dict[str, list[float]] = defaultdict(list)
    for kind, log in zip(kinds, logs, strict=True):
        of_kinds[kind].append(log)
    within = sum(len(each) * statistics.pvariance(each) for each in of_kinds.values()) / len(logs)
    reached = figures(found)
    known = {prompt_of(request) for request in warm_up}
    return {
        "lengths": True,
        "hints": loads[0].case.hints,
        "requests": len(found),
        "spread": spread,
        **reached,
        "explained": 1 - (reached["rms"] / spread) ** 2 if spread else 0.0,
        "explained_by_kinds": 1 - within / spread**2 if spread else 0.0,
        "seen": statistics.fmean(prompt_of(request) in known for load in loads for request in load.requests),
    }


def estimates(load: Workload) -> list[Estimated]:
    """Return the estimate of each request, all made before the first one ends."""
    priors, found = priors_of(load.priors), []
    for job in make_jobs(load.requests, load.truths, load.due_s):
        name, tenant = job.workload_class, job.tenant
        guesses = Guesses(
            job.facts(0).guessed_tokens, priors.prompts.predict(job.length_features, name, tenant)
        )
        left = priors.tokens_left(name, 0, job.max_tokens, guesses, tenant)
        found.append(Estimated(job.output_tokens, math.sqrt(left.low * left.high), left.low, left.high))
    return found


def prompt_of(request: pb.GenerateRequest) -> str:
    """Return the prompt, as a text or a chat."""
    return request.text or request.messages.messages[-1].content
