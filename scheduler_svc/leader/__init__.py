"""The leading scheduler: one loop that owns the core, the working copies of the record and all sessions."""
