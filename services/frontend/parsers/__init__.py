"""Answers of models, read as they come: content, reasoning and tool calls.

`tables.py` lists the families by name. A family is data: marks, and for each opening mark a reader, which is a generator that
reads on behind the mark from a `Feed` and yields whenever it needs more text. `parser.py` drives it.
"""
