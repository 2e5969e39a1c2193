"""Which request runs where, and nothing else: a pure function of events and time.

Standard library only: no clock, no I/O, no randomness, no logging. The same events at the same times give the
same commands.
"""
