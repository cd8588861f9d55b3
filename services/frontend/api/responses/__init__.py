"""OpenAI's Responses API: typed items in and out, typed events, and a store from which conversations continue."""
