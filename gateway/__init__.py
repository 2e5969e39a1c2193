"""The stateless front end: validates and tokenizes requests, submits them over its link to a shard's leader,
and streams text back."""
