"""Parts of docs/evidence.md and docs/evidence: the results that it reads, and its sections."""
