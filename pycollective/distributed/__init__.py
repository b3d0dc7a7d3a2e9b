"""Global arrays: JAX's own multi-process programs, with XLA's collectives through MPI."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # __main__ runs before JAX is imported
