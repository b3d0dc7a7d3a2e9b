"""Starting ranks: the launcher that belongs to the MPI library, and what each rank needs around it."""
