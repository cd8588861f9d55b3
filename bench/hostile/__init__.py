"""What hostile clients cost a well-behaved one."""
