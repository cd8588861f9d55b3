"""How many workers a load needs."""
