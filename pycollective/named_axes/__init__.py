"""Named axes over ranks x local devices, and how collectives over them become primitives."""
