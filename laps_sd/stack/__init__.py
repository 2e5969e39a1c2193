"""A whole system as processes of this machine, for `laps-sd up`, tests and benchmarks."""
