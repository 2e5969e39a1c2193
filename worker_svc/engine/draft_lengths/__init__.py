"""Number of draft tokens of each request and round."""
