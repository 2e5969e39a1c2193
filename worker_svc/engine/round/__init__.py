"""The round: plan, draft, verify, commit, over one `RoundRequest` per request. `step` runs them in this order."""
