"""Cache of keys and values: blocks, tables, prefixes."""
