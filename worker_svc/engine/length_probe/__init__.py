"""A prediction of the output length that remains, read off the target's hidden state and learnt online."""
