"""Pictures of a ShardPlan: what each rank will see, drawn from the plan itself.

Every view has one file with four functions of one form, here for ``load``:

``compute_load(plan, epoch=0, *, ranks=None, steps=None, ...) -> LoadArrays``
    The numbers, without matplotlib. Takes a bounded time (about `looked_at.QUICK` draws) at any
    size; the arrays are exact where so many draws are all of them, else of a random part.
``refine_load(plan, ...) -> Iterator[LoadArrays]``
    The same arguments. Better arrays, each in the place of the one before; the last is exact. Can
    be left at any time.
``draw_load(arrays, figure=None) -> Figure``
    A figure with an Agg canvas, outside pyplot. A figure that a draw function returned may be given
    again: its axes are kept where the view has the same panels, which is twice as quick.
``plot_load(plan, ..., exact=False, figure=None) -> Figure``
    Both in one: of the quick arrays, or of the last refined ones.

All arrays have ``facts``, a `Facts`: what is asked, what to look for, ``truth`` ("exact: ..." or
"sample of 2 %: ..."), ``exact``, the key ``numbers`` (each with ``wrong``: red and with a sign in
the picture), the line about the plan, and ``alt``, the text for who can not see it.
`nvalchemi.notebook.export` makes PNG, SVG and the bundle of HTML and text from a figure and its
facts, with the same bytes for the same plan.

The views are in `VIEWS`, by name: "assignment", "composition", "load", "overlap", "order",
"resume" (needs ``other`` and ``stop``), "coverage" (takes ``epochs``), "batch" (takes ``rank`` and
``step``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvalchemi.notebook.plots.facts import Facts, Number

if TYPE_CHECKING:
    from nvalchemi.notebook.plots.assignment import plot_assignment
    from nvalchemi.notebook.plots.batch import plot_batch
    from nvalchemi.notebook.plots.composition import plot_composition
    from nvalchemi.notebook.plots.coverage import plot_coverage
    from nvalchemi.notebook.plots.load import plot_load
    from nvalchemi.notebook.plots.order import plot_order
    from nvalchemi.notebook.plots.overlap import plot_overlap
    from nvalchemi.notebook.plots.parity_figure import parity
    from nvalchemi.notebook.plots.resume import plot_resume
    from nvalchemi.notebook.plots.run import plot_run

NAMES = ("assignment", "composition", "load", "overlap", "order", "resume", "coverage", "batch")

__all__ = [
    "Facts",
    "Number",
    "VIEWS",
    "View",
    "parity",
    "plot_assignment",
    "plot_batch",
    "plot_composition",
    "plot_coverage",
    "plot_dataset",
    "plot_labels",
    "plot_load",
    "plot_order",
    "plot_overlap",
    "plot_resume",
    "plot_run",
]


@dataclass(frozen=True)
class View:
    """One view by name; its functions are imported when they are called.

    Attributes
    ----------
    name : str
    """

    name: str

    def _function(self, kind: str) -> Callable[..., Any]:
        module = import_module(f"nvalchemi.notebook.plots.{self.name}")
        function: Callable[..., Any] = getattr(module, f"{kind}_{self.name}")
        return function

    def compute(self, plan: Any, *args: Any, **options: Any) -> Any:
        """Arrays in bounded time."""
        return self._function("compute")(plan, *args, **options)

    def refine(self, plan: Any, *args: Any, **options: Any) -> Iterator[Any]:
        """Better arrays one after the other, the last exact."""
        refined: Iterator[Any] = self._function("refine")(plan, *args, **options)
        return refined

    def draw(self, arrays: Any, figure: Any = None) -> Any:
        """The figure of some arrays."""
        return self._function("draw")(arrays, figure)


VIEWS: dict[str, View] = {name: View(name) for name in NAMES}


def __getattr__(name: str) -> Any:
    if name in __all__:
        # a module "parity" would take the place of the function once it is imported
        file = "parity_figure" if name == "parity" else name.removeprefix("plot_")
        module = import_module(f"nvalchemi.notebook.plots.{file}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
