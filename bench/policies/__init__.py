"""Policies that are here to be compared with; the router does not ship them."""
