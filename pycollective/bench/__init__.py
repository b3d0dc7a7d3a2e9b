"""``pycollective bench`` measures collectives beside raw MPI and other libraries, in one run."""
