"""Simulation of the production core in virtual time: the effect of a policy on a workload, without machines.

`jobs` defines requests with their outputs, `machine` the cost of a round; `worker` is the worker's side of
the scheduling contract, with the requests that it holds (`held`) and its `prefix_cache`; `cluster` runs jobs through
the core and its workers, with an `outcome`; `oracle` is a policy with knowledge of the true outputs, `routers` are
rules of placement to compare with, `autoscaler` adds and removes workers. `workload` describes workloads, `draw`
draws jobs from a description, also as `conversations`; `samples`, `traces` and `lengths` read public recordings.
`recording` writes what the console's demo shows.
"""
