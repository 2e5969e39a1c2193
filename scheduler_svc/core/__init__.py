"""The scheduling decisions: a pure function of events and time that returns which request runs where.

Standard library only: no clock, no I/O, no randomness, no logging. The same events at the same times give the
same commands.

It runs as it is, or compiled ahead of time by mypyc, which makes it about twice as fast (`make compiled`). So
no tuple is compared by identity here, and no test replaces a method of an object of the core.
"""

from importlib.util import find_spec

_found = find_spec("scheduler_svc.core.scheduler")
COMPILED = _found is not None and not str(_found.origin).endswith(".py")
"""True if this is the compiled core."""
