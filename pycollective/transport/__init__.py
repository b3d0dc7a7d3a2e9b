"""The transport: MPI, the native library with XLA's handlers, and the runtime libraries of accelerators."""
