"""``jit``, ``pmap`` and ``shard_map``: what :mod:`jax` has by these names, over ranks x local devices."""
