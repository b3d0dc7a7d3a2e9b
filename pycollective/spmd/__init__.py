"""``jit``, ``pmap`` and ``shard_map`` over ranks x local devices."""
