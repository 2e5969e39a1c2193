"""Parts of `laps-sd bench serve`: options, runs, rows of results, goals, tables."""
