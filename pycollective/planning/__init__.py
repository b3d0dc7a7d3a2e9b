"""Predicts how long a step of training takes, and how much memory it needs, for each way to spread it over devices.

There are two planners, each a room of its own that does not import the other one:

- :mod:`by_compiling` (``pc.plan``) takes any step of global arrays, compiles it for each way, and reads XLA's program;
- :mod:`by_formulas` takes a network written with ``pycollective.parallel``, whose author lists its parts, and computes
  what each layout takes, pipelines among them.

The command ``pycollective plan`` (``command.py``) chooses one by what a program has. They share what lies beside these
rooms: the profile of a cluster and its curves (``profile.py``, ``curves.py``, ``example.py``), and how a plan is tried
out, by the time of a call of all ranks (``timing.py``), the most memory of a process (``allocation.py``) and a progress
bar (``progress.py``).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # its commands need little of it
