"""Jupyter-first distributed training of atomistic machine-learning models.

Nothing heavy is imported here: neither torch nor numpy loads before a submodule asks for it.
"""

__version__ = "0.1.0.dev0"
