"""Training from a notebook cell."""

# not lazily: loading the submodule of the same name later would put it in the function's place
from nvalchemi.notebook.launch import RankError, RankResults, launch

__all__ = ["RankError", "RankResults", "launch"]
