"""Parts of docs/evidence.md: the results that it reads, and its sections."""
