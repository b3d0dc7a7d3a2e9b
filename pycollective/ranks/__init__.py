"""The ranks: communicators, the devices and cores of each rank, and what ranks compare outside programs."""
