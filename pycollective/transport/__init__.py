"""Which FFI target and attributes carry a primitive."""
