"""The operator of LAPS-SD: keeps as many workers per SpeculativePool as it says, and takes them away without haste."""
