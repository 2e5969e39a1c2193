"""Training of what the scheduler knows of output lengths before it has seen any."""
