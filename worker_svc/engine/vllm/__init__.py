"""The engine over vLLM: one round is one step of vLLM's engine core, in this process.

Imports vLLM, so nothing but `worker_svc.loading` imports it, and only where the settings name this engine. Of
the other engine it uses the interface, `cache.prompts`, `length_probe`, `sampling` and the costs of rounds; no
model of `transformers` is loaded.
"""
