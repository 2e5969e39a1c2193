"""gRPC services of the scheduler."""
