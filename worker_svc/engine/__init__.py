"""The engine: draft, verify, commit. It knows tensors and block ids, no network and no clock but its own stopwatch.

`interface` (standard library only) is what the rest of the worker programs against; `load_engine` lives in
`worker_svc.engine.engine` and is what imports torch.
"""
