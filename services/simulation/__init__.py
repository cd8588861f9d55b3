"""A whole mesh of the production parts in one process, on virtual time, with faults from a seed."""
