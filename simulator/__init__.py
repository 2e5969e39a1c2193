"""Simulation of the production core in virtual time: the effect of a policy on a workload, without machines.

`jobs` defines requests with their outputs, `machine` the cost of a round; `cluster` runs both through the
core; `oracle` is a policy with knowledge of the true outputs; `workload` draws jobs from a description;
`traces` reads public recordings.
"""
