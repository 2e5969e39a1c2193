"""The loop that runs an engine, and the process that it runs in."""
