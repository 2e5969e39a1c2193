"""A request in some state, and the rank that a policy gives it."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request

SETTINGS = CoreSettings()


def rank(
    priors: Priors | None = None,
    policy: str = "laps-sd",
    settings: CoreSettings = SETTINGS,
    **fields: object,
) -> RankKey:
    """Return a request in the state that the fields give."""
    return policy_named(policy, settings).rank(make(**fields), priors or Priors())


def make(
    hint: int | None = None,
    priority: int = 0,
    most: int = 2000,
    prompt: int = 100,
    sequence: int = 1,
    **fields: object,
) -> Request:
    about = RequestFacts("r", sequence, 0.0, "t", priority, "", prompt, most, hint)
    request = Request(about, guesses=Guesses(about.guessed_tokens))
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def experienced(lengths: list[int] = [150] * 50, guesses: float = 1.0) -> Priors:
    """Return priors that saw requests of these lengths, each guessed wrong by this factor."""
    priors = Priors()
    for length in lengths:
        priors.observe_length("", length, Guesses(client=length * guesses))
    return priors


def live(
    policy: str, request: Request, settings: CoreSettings = SETTINGS, priors: Priors | None = None
) -> RankKey:
    """Compute the rank of a request and store it, as the scheduler does after an event."""
    key = policy_named(policy, settings).rank(request, priors or Priors())
    request.set_rank(key)
    return key
