"""`laps-sd top`: one or several shards in the terminal, live."""
