from .start import initialize as initialize
