"""The ranks: communicators, and which devices and cores each rank has."""
