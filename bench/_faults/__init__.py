"""Fault injection: a plan that a seed decides, and its execution on a stack of processes.

A plan holds the kind of each fault, its time, its duration and a random draw that picks its victim among
those that can be hit at that time. A component that is still down from an earlier fault is not hit again
before it is back, and one of each pair stays up, unless the kind names more: every line of docs/guarantees.md
is about a fault while the other parts run.
"""
