"""The round: plan, draft, verify, commit, over one `RoundRequest` for each request. `step` runs them."""
