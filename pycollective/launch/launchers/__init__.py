"""A class for each launcher, and for the batch system that it belongs to."""
