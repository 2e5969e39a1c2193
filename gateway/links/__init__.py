"""Streams of requests between this gateway and the leading scheduler of each shard."""
