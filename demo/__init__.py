"""Training and evaluation of the model pair that ships with LAPS-SD. It is not installed."""
