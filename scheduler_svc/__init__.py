"""The scheduler of one shard: orders and preempts requests by LAPS-SD and keeps the record."""
