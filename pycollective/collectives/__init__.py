"""The public collectives: functions with jax.lax's names, and functions with MPI's names."""
