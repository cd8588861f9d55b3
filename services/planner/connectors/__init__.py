"""How the planner acts."""
