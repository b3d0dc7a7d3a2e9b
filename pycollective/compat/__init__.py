"""Other packages' functions with their own names and signatures, on the public functions of this package."""
