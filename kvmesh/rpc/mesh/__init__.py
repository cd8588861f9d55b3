"""Reads a mesh from outside, through the registry, its routers and its planner, and joins the results into rows."""
