"""One timeline of the calls of all ranks: ``pycollective.trace``."""
