"""The stateless front: validates, tokenizes, submits over its link to a shard's leader, and streams text back."""
