"""Attacks on the mesh. Each test is an attack that must fail; its docstring says what the attacker has."""
