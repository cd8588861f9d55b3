"""Files and batches: many requests in one file, run when the mesh has room, answered in another file."""
