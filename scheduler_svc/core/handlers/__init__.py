"""What each kind of event changes in the shard: one file for each source of events."""
