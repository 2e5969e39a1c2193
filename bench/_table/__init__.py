"""Parts of `laps-sd bench engine --table`: engines by precision and number of threads, compared in turns."""
