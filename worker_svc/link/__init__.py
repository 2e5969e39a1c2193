"""The stream to the leading scheduler."""
