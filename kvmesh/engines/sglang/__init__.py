"""The SGLang adapter.

Only `host/` imports sglang. It runs in a process of its own, with the Python of the virtual environment that has SGLang.
"""
