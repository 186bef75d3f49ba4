"""The page that greets a browser: a chat, and what the engine does meanwhile."""
