"""The text that the GPTs of these examples learn: the modules of Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np


def read_text(limit=1_000_000):
    """Returns the text as numbers, and the character for each number."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8") for module in modules)[:limit]
    vocabulary, numbers = np.unique(list(text), return_inverse=True)
    return numbers.astype(np.int32), vocabulary


def draw_starts(text, context, rows, seed):
    """Returns where each row of a batch begins in the text. A row has ``context`` characters and the one after them."""
    return np.random.default_rng(seed).integers(len(text) - context, size=rows)
