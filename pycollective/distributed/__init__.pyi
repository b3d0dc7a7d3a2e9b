from .begin import initialize as initialize
