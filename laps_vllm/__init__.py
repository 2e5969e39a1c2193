"""LAPS-SD inside vLLM: a scheduler class for `vllm serve`, and the parts that its worker engine shares.

`vllm serve MODEL --scheduler-cls laps_vllm.scheduler.LapsScheduler`; docs/vllm.md is the user's page.

This file imports nothing: a worker uses `laps_vllm.pausing` and must not import the scheduling core with it.
"""
