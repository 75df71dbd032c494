"""What a structure and a batch have in common: named tensors at levels, read, moved and copied."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from nvalchemi.data.fields import Level, resolve_level


class TensorFields:
    """Tensors by name, each at a level, all on one device."""

    _values: dict[str, Tensor]
    _levels: dict[str, Level]

    def _with_values(self, values: dict[str, Tensor]) -> Self:
        """Object like this one around other tensors of the same names and counts."""
        raise NotImplementedError

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self._with_values({name: function(value) for name, value in self._values.items()})

    @property
    def device(self) -> torch.device:
        """Device of all fields."""
        return self._values["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the positions."""
        return self._values["positions"].dtype

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def fields(self, level: str) -> dict[str, Tensor]:
        """Fields of one level ("atom" or "node", "edge", "system") by name."""
        wanted = resolve_level(level)
        return {name: v for name, v in self._values.items() if self._levels[name] == wanted}

    def model_dump(self) -> dict[str, Tensor]:
        """All fields that are present, by name."""
        return dict(self._values)

    def to(
        self,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Move to a device and, for floating-point fields, a dtype; itself if all are there.

        Raises
        ------
        ValueError
            If the dtype is not a floating-point one.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point one: got {dtype}")

        def move(value: Tensor) -> Tensor:
            cast = dtype if value.dtype.is_floating_point else None
            return value.to(device=device, dtype=cast, non_blocking=non_blocking)

        values = {name: move(value) for name, value in self._values.items()}
        if all(value is self._values[name] for name, value in values.items()):
            return self
        return self._with_values(values)

    def cpu(self) -> Self:
        """Move to the CPU."""
        return self.to("cpu")

    def cuda(self) -> Self:
        """Move to the current CUDA device."""
        return self.to("cuda")

    def __copy__(self) -> Self:
        # the tensors are shared, but setting a field of one leaves the other as it is
        return self._map(lambda value: value)

    def clone(self) -> Self:
        """Copy with tensors of its own."""
        return self._map(torch.clone)

    def contiguous(self) -> Self:
        """Copy in which every field is contiguous."""
        return self._map(lambda value: value.contiguous())

    def pin_memory(self) -> Self:
        """Copy in page-locked memory, for faster transfer to a GPU."""
        return self._map(lambda value: value.pin_memory())


def same_fields(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of fields hold the same names, dtypes, shapes and values."""
    if first.keys() != second.keys():
        return False
    for name, a in first.items():
        b = second[name]
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        same = a == b
        if a.dtype.is_floating_point:
            same |= a.isnan() & b.isnan()
        if not bool(same.all()):
            return False
    return True
