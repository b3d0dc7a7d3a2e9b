"""Named axes over ranks x local devices, and what collectives over them become."""
