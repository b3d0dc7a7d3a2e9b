"""A class for each MPI library."""
