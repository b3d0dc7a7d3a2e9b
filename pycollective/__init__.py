"""Write jax.lax, run on MPI: collectives inside jax.jit through the MPI library of the machine.

What stands in ``__init__.pyi`` is imported when it is first used. So ``import pycollective`` alone starts neither MPI
nor JAX: ``pycollective run`` starts ranks without being one, also where only a launcher may start processes with MPI.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
