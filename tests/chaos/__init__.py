"""Real meshes whose processes are killed and stopped."""
