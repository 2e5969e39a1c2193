"""Anthropic's Messages API: bodies as chats, answers as content blocks. Pure."""
