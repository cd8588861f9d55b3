"""What if: recorded or made-up traffic through the router's and the planner's own code and simulated workers, in virtual time."""
