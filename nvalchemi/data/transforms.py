"""Compose: several transforms as one."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch

_KINDS: dict[type, str] = {AtomicData: "sample", Batch: "batch"}


def _kind(transform: Callable[..., Any], position: int) -> str | None:
    """Whether a transform is for samples or batches, by the annotation of its first parameter."""
    if isinstance(transform, Compose):
        return None if transform.is_batch is None else "batch" if transform.is_batch else "sample"
    try:
        first = next(iter(inspect.signature(transform).parameters.values()))
    except (StopIteration, ValueError):
        return None
    annotation = first.annotation
    if annotation is inspect.Parameter.empty:
        return None
    for base, kind in _KINDS.items():
        # a string where the module defers the evaluation of annotations
        named = isinstance(annotation, str) and annotation.rpartition(".")[2] == base.__name__
        if named or (isinstance(annotation, type) and issubclass(annotation, base)):
            return kind
    raise TypeError(
        f"the first parameter of transforms[{position}] must be annotated AtomicData or Batch, "
        f"or not at all: got {annotation!r}"
    )


class Compose:
    """Apply transforms one after the other; none at all is the identity.

    Parameters
    ----------
    transforms : iterable of callables
        All for samples, ``(data, metadata) -> (data, metadata)``, or all for batches,
        ``batch -> batch``; the annotation of the first parameter tells, if there is one.

    Raises
    ------
    TypeError
        If the two kinds are mixed, or one can not be called.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]]) -> None:
        self.transforms = tuple(transforms)
        for i, transform in enumerate(self.transforms):
            if not callable(transform):
                raise TypeError(f"transforms[{i}] must be callable: got {transform!r}")
        kinds = {kind for i, t in enumerate(self.transforms) if (kind := _kind(t, i)) is not None}
        if len(kinds) > 1:
            raise TypeError("transforms must all be for AtomicData or all for Batch: got both")
        self.is_batch: bool | None = None if not kinds else kinds == {"batch"}

    def __call__(self, *args: Any) -> Any:
        for transform in self.transforms:
            result = transform(*args)
            args = result if isinstance(result, tuple) else (result,)
        return args if len(args) > 1 else args[0]
