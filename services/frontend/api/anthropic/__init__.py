"""Anthropic's Messages API: blocks in and out, typed events, and a count of tokens."""
