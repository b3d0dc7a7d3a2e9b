"""What ``scripts/gpu-check`` runs: all that needs a GPU, as steps of which each may fail or lack something.

Modules that the runner imports need the standard library alone: it starts in a Python that has nothing else.
"""
