"""A mesh as one sees it from outside: read from the registry, routers and a planner, and joined into rows."""
