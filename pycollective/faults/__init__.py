"""Faults: how a rank ends, when it ends the others, and how the others learn of it; reports of long waits."""
