"""Layouts of a network (``pycollective plan``): formulas say what devices do, from the parts that its author lists."""
