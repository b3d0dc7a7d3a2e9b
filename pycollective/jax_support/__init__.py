"""What this package needs of JAX beyond its public API, and tools for programs as jaxprs."""
