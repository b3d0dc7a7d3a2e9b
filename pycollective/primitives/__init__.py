"""The primitives: each collective over a communicator, as JAX differentiates, batches and lowers it."""
