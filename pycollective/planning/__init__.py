"""Predicts how long a step of training takes, and how much memory it needs, for each way to spread it over devices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # its commands need little of it
