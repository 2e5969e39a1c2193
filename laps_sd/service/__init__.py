"""Parts that all services share: settings, logs, metrics, tracing, gRPC servers and channels."""
