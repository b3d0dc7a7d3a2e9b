"""The public functions over communicators and axis names: jax.lax's and MPI's."""
