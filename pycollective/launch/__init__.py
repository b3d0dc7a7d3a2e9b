"""Starting ranks: launchers, MPI libraries and batch systems, and what each rank needs around it."""
