import jax
import jax.numpy as jnp

import pycollective as pc

comm = pc.init()


@pc.jit
def norm(piece):  # of a vector whose pieces lie on the ranks
    return jnp.sqrt(pc.psum(jnp.vdot(piece, piece), comm))


piece = jnp.full(4, comm.rank + 1.0)
# Every rank computes the norm and counts it, so that each takes its share of the derivative.
slope = jax.grad(lambda piece: norm(piece) / comm.size)(piece)
slopes = pc.all_gather(slope[0], comm)
total = norm(piece)  # on all ranks: a collective on one alone would wait for ever
if comm.rank == 0:
    print(f"{comm.size} ranks, norm {total:.4f}, slopes", *(f"{slope:.4f}" for slope in slopes))
