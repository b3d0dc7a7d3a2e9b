"""The order of collectives, inside a program and between programs."""
