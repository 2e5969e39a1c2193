"""The engine: draft, verify, commit. It handles tensors and block ids, no network and no clock but its own
stopwatch.

The rest of the worker uses `interface` (standard library only); `load_engine` is in
`worker_svc.engine.load`, which imports torch.
"""
