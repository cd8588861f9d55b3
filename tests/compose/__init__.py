"""The stack of compose/, in real containers."""
