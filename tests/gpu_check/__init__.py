"""The steps of ``scripts/gpu-check``: checks and measurements that need a GPU. If a step fails, the others still run.

The modules that the runner imports need only the standard library: it starts in a Python that may have nothing else.
"""
