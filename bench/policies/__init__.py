"""Policies for comparison only; the router does not have them."""
