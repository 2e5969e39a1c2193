"""OpenAI's Responses API: bodies as chats, answers as items. Pure."""
