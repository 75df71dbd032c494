"""Sources of numbered structures for tests of data sets and loaders."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from store_cases import chain

from nvalchemi.data import AtomicData, Batch


def numbered(count: int, start: int = 0) -> list[AtomicData]:
    """Structures of 1 to 4 atoms whose energy is their number."""
    return [chain(1 + i % 4, energy=float(start + i)) for i in range(count)]


def numbers(batches: Sequence[Batch]) -> list[list[int]]:
    """Which structures lie in each batch, told by their energies."""
    return [batch.energy.squeeze(1).int().tolist() for batch in batches]


class ListReader:
    """The least that a reader must have; it notes every read and can be made to wait or fail."""

    def __init__(self, structures: list[AtomicData], fails_at: int | None = None) -> None:
        self.structures = structures
        self.fails_at = fails_at
        self.reads: list[list[int]] = []
        self.running = 0
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.structures)

    def read_many(self, indices: Sequence[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        self.running += 1
        try:
            self.reads.append(list(indices))
            assert self.gate.wait(timeout=60)
            if self.fails_at in indices:
                self._break()
            return [(self.structures[i].to_dict(), {"name": f"s{i}"}) for i in indices]
        finally:
            self.running -= 1

    def _break(self) -> None:
        raise OSError(f"disk gone at {self.fails_at}")

    def close(self) -> None:
        self.closed = True


class OwnDataset:
    """A data set of a user's own: BatchDatasetProtocol and nothing more, with slots."""

    __slots__ = ("closed", "structures")

    def __init__(self, structures: list[AtomicData]) -> None:
        self.structures = structures
        self.closed = False

    def __len__(self) -> int:
        return len(self.structures)

    def __getitem__(self, index: int) -> tuple[AtomicData, dict[str, Any]]:
        return self.structures[index], {"own": index}

    def load_batches(self, index_lists: Any, stream: Any = None) -> list[Batch]:
        return [Batch.from_data_list([self.structures[i] for i in part]) for part in index_lists]

    @property
    def field_names(self) -> list[str]:
        return list(self.structures[0].to_dict()) if self.structures else []

    def get_metadata(self, index: int) -> tuple[int, int]:
        return self.structures[index].num_nodes, self.structures[index].num_edges

    def close(self) -> None:
        self.closed = True


def wait_for(condition: Callable[[], Any]) -> None:
    """Until the background has got somewhere; the limit only bounds a failure."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the background did not get there"
        time.sleep(0.001)
