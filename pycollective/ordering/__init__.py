"""The order of collectives, inside a program and between programs; JAX's private parts and jaxprs."""
