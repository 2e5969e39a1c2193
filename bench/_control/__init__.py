"""Parts of `laps-sd bench control`: options and goals, the core, the whole scheduler."""
