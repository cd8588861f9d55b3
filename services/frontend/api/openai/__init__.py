"""OpenAI's HTTP API: chat, completions, embeddings, tokens."""
