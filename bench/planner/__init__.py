"""Compares the planner with other ways to size pools, in simulations."""
