"""Faults: how a rank ends, when it ends the other ranks, and the watchdog of long waits."""
