"""The production core in virtual time: what a policy does to a workload, without the machines.

`jobs` says what requests turn out to be, `machine` what a round costs, `cluster` runs both through the core, `oracle`
is the policy that knows the truth, `workload` draws jobs from a description, `traces` reads public recordings.
"""
