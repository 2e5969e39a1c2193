"""The worker: a speculative-decoding engine with one stream to the scheduler.

Nothing heavy is imported here, so that `import worker_svc` stays cheap and free of torch.
"""
