"""The engine process: SGLang's scheduler behind a Unix socket. The only modules that import sglang and torch."""
