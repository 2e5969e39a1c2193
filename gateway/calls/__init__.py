"""A client's call from its validation to its last token, whichever API it came by."""
