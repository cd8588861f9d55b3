"""The simulated engine: real scheduling, real KV bytes, made-up tokens. For development, tests, planning and scale runs."""
