"""Effects of events on the shard: one file for each source of events."""
