"""OpenAI's Responses API: typed items in and out, typed events, and a store for conversations that go on."""
