"""The primitives: one for each collective over a communicator, with the rules by which JAX transforms and lowers it."""
