"""``pycollective run`` starts a program as ranks, through the launcher of the MPI library that mpi4py loads."""
