"""State of requests, workers, tenants and shards."""
