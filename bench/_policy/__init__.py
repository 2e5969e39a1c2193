"""Parts of `laps-sd bench policy`: regimes, runs, rows of results, verdicts, tables."""
