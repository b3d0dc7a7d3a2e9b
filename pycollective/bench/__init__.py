"""``pycollective bench``: collectives measured beside raw MPI and other libraries, in one run."""
