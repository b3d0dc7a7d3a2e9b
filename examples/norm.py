import jax
import jax.numpy as jnp

import pycollective as pc

comm = pc.init()


@pc.jit
def norm(piece):  # the norm of a vector; each rank has one piece of it
    return jnp.sqrt(pc.psum(jnp.vdot(piece, piece), comm))


piece = jnp.full(4, comm.rank + 1.0)
# jax.grad differentiates the sum of all ranks' losses. Each rank computes the same norm, so each loss is a share of it.
slope = jax.grad(lambda piece: norm(piece) / comm.size)(piece)
slopes = pc.all_gather(slope[0], comm)
total = norm(piece)  # on all ranks: rank 0 alone would wait for the others for ever
if comm.rank == 0:
    print(f"{comm.size} ranks, norm {total:.4f}, slopes", *(f"{slope:.4f}" for slope in slopes))
