"""Parts of `laps-sd bench gpu`: options, lower bounds, the pair on the device, the goal."""
