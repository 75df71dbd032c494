"""Sizes of samples: from the tables of readers and data sets, or as the caller gives them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipe_cases import ListReader, OwnDataset, numbered
from size_cases import Sized

from nvalchemi.data import Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)
from nvalchemi.data.datapipes.sample_sizes import sample_sizes


class Unread(AtomicDataZarrReader):
    """A store from which no structure may be read."""

    def read_batch(self, indices: Any) -> Batch:
        raise AssertionError("a structure was read")


def test_sizes_come_from_the_pointers_of_a_store(tmp_path: Path):
    AtomicDataZarrWriter(tmp_path / "s.zarr").write(numbered(7))
    atoms, edges = Dataset(Unread(tmp_path / "s.zarr"), device="cpu").sizes()
    assert atoms.tolist() == [1, 2, 3, 4, 1, 2, 3] and atoms.dtype == np.int64
    assert edges.tolist() == [0, 1, 2, 3, 0, 1, 2] and edges.dtype == np.int64


def test_sizes_of_several_data_sets_follow_each_other(tmp_path: Path):
    AtomicDataZarrWriter(tmp_path / "s.zarr").write(numbered(3))
    held = InMemoryDataset(Batch.from_data_list(numbered(2, start=3)))
    with Dataset(AtomicDataZarrReader(tmp_path / "s.zarr"), device="cpu") as stored:
        both = MultiDataset(stored, held)
        assert [column.tolist() for column in both.sizes()] == [[1, 2, 3, 1, 2], [0, 1, 2, 0, 1]]
        expected = [both.get_metadata(i) for i in range(len(both))]
        assert list(zip(*(column.tolist() for column in both.sizes()))) == expected


def test_nothing_is_read_where_there_is_no_table():
    reader = ListReader(numbered(3))
    with pytest.raises(TypeError, match="ListReader has no num_nodes_per_sample.*give the sampler"):
        Dataset(reader, device="cpu").sizes()
    assert reader.reads == []
    with pytest.raises(TypeError, match=r"OwnDataset has no sizes\(\).*sizes=\(atoms, edges\)"):
        MultiDataset(OwnDataset(numbered(3))).sizes()


def test_given_sizes_are_kept_small():
    atoms, edges = sample_sizes(Sized(3), ([1, 2, 300], np.array([70000, 0, 1])), 3)
    assert (atoms.dtype, edges.dtype) == (np.uint16, np.uint32)
    given = np.array([1, 2, 3], dtype=np.uint64)
    assert sample_sizes(Sized(3), given, 3)[0] is given
    assert sample_sizes(Sized(2), [4, 5], 2)[0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (np.ones(4, int), ValueError, r"one entry for each of 3 samples, got shape \(4,\)"),
        (np.ones((3, 2), int), ValueError, r"got shape \(3, 2\)"),
        ([1.0, 2.0, 3.0], TypeError, "sizes must be integers, got float64"),
        ([1, -2, 3], ValueError, "sizes must be >= 0, got -2 at 1"),
        (([1, 2, 3],) * 3, ValueError, r"the pair \(atoms, edges\), got 3 arrays"),
        (([1, 2, 3], [1, 2]), ValueError, r"sizes\[1\] must have one entry"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        sample_sizes(Sized(3), sizes, 3)
