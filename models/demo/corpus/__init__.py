"""The text that the demo model is trained on, generated from small tables and a seeded random generator."""
