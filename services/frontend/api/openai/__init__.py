"""OpenAI's HTTP API: bodies in, bodies and event streams out. Knows the pipeline's request and outlet, nothing below them."""
