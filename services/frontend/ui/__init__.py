"""The page /ui, which shows the mesh."""
