"""Load generator, scenarios and side-by-side runs."""
