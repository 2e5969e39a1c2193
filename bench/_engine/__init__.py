"""Parts of `laps-sd bench engine`: options, cells, engines, configurations, turns, rows of results, goals,
tables."""
