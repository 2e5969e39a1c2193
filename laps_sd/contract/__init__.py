"""Pure rules that two services must agree on."""
