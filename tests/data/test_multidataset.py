import pickle

import numpy as np
import pytest
import torch
from pipe_cases import ListReader, OwnDataset, numbered, numbers
from random_structures import random_structure

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchDatasetProtocol,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)

# Of three children: 5 behind a reader, 1 of the user's own, 4 in memory.
PARTS = [numbered(5), numbered(1, start=5), numbered(4, start=6)]
ALL = [data for part in PARTS for data in part]


def listed(structures: list[AtomicData]) -> Dataset:
    return Dataset(ListReader(structures), device="cpu")


def mixed() -> MultiDataset:
    return MultiDataset(
        listed(PARTS[0]), OwnDataset(PARTS[1]), InMemoryDataset(Batch.from_data_list(PARTS[2]))
    )


def unlabelled(structures: list[AtomicData]) -> list[AtomicData]:
    return [data.replace(energy=None, forces=None) for data in structures]


# Indexing.


def test_the_children_lie_end_to_end():
    multi = mixed()
    assert isinstance(multi, BatchDatasetProtocol)
    assert (len(multi), multi.offsets) == (10, [0, 5, 6, 10])
    assert isinstance(multi.datasets, tuple) and len(multi.datasets) == 3
    assert [data for data, _ in multi] == ALL
    assert [meta["dataset_index"] for _, meta in multi] == [0] * 5 + [1] + [2] * 4
    assert multi[0][1]["name"] == "s0" and multi[5][1]["own"] == 0
    assert multi[np.int64(-1)][0] == ALL[-1]
    assert [multi.get_metadata(i) for i in range(-10, 0)] == [
        (d.num_nodes, d.num_edges) for d in ALL
    ]
    assert "5 + 1 + 4 = 10" in repr(multi)


def test_indices_of_children_and_of_all():
    multi = mixed()
    for index in range(10):
        child, local = multi.to_local_index(index)
        assert multi.to_global_index(child, local) == index
        assert multi.to_local_index(index - 10) == (child, local)
    assert multi.to_global_index(-1, -1) == 9 and multi.to_local_index(5) == (1, 0)
    for use in (
        lambda: multi.to_global_index(3, 0),
        lambda: multi.to_global_index(1, 1),
        lambda: multi.to_local_index(10),
        lambda: multi[-11],
        lambda: multi.load_batches([[0, 10]]),
    ):
        with pytest.raises(IndexError, match=r"index must lie in -\d+..\d+: got -?\d+"):
            use()
    for wrong in (1.5, True):
        with pytest.raises(TypeError, match="must be an integer"):
            multi.load_batches([[wrong]])


def test_batches_in_mixed_order():
    multi = mixed()
    lists = [[9, 0, 5, 3, 0], [5], [-1, 6, -10]]
    batches = multi.load_batches(lists)
    for batch, indices in zip(batches, lists):
        assert batch == Batch.from_data_list([ALL[i] for i in indices])
        assert batch.metadata["index"].tolist() == [i % 10 for i in indices]
        owners = [multi.to_local_index(i)[0] for i in indices]
        assert batch.metadata["dataset_index"].tolist() == owners
        batch.validate()
    assert multi.get_batch([1, 8]) == Batch.from_data_list([ALL[1], ALL[8]])


def test_each_child_is_read_once_for_a_window():
    readers = [ListReader(numbered(4)), ListReader(numbered(4, start=4))]
    multi = MultiDataset(*(Dataset(reader, device="cpu") for reader in readers))
    multi.get_batch([0, 4])
    for reader in readers:
        reader.reads.clear()
    multi.load_batches([[7, 0], [1, 6], [5]])
    assert [reader.reads for reader in readers] == [[[0, 1]], [[3, 2, 1]]]


def test_stores_of_different_structures(tmp_path):
    parts = [
        [random_structure(n, e, seed=n, periodic=True) for n, e in sizes]
        for sizes in (((3, 4), (1, 0), (5, 9)), ((2, 2),))
    ]
    for name, part in zip("ab", parts):
        AtomicDataZarrWriter(tmp_path / name).write(part)
    readers = (AtomicDataZarrReader(tmp_path / name) for name in "ab")
    with MultiDataset(*(Dataset(reader, device="cpu") for reader in readers)) as multi:
        batch = multi.get_batch([3, 2, 0, 3, 1])
        flat = [*parts[0], *parts[1]]
        assert batch.to_data_list() == [flat[i] for i in (3, 2, 0, 3, 1)]


def test_a_multidataset_of_multidatasets():
    multi = MultiDataset(mixed(), listed(numbered(2, start=10)))
    (batch,) = multi.load_batches([[11, 5, 0, 9]])
    assert numbers([batch]) == [[11, 5, 0, 9]]
    assert batch.metadata["dataset_index"].tolist() == [1, 0, 0, 0]
    assert batch.metadata["index"].tolist() == [11, 5, 0, 9]


# Children.


def test_children_are_checked():
    with pytest.raises(ValueError, match="needs at least one data set"):
        MultiDataset()
    for wrong in ([listed(PARTS[0])], numbered(2), "store.zarr", ListReader([])):
        with pytest.raises(TypeError, match=r"datasets\[1\] must be a data set .*: got"):
            MultiDataset(listed(PARTS[0]), wrong)


def test_empty_children_count_for_nothing():
    multi = MultiDataset(listed([]), listed(PARTS[0]), listed([]), listed(PARTS[2]))
    assert multi.offsets == [0, 0, 5, 5, 9] and multi.to_local_index(0) == (1, 0)
    assert multi.to_local_index(5) == (3, 0)
    assert numbers(multi.load_batches([[8, 0, 5]])) == [[9, 0, 6]]
    nothing = MultiDataset(listed([]))
    assert len(nothing) == 0 and list(DataLoader(nothing, shuffle=True)) == []
    with pytest.raises(IndexError, match="the data set is empty"):
        nothing.load_batches([[0]])


def test_a_child_that_gives_too_few_is_named():
    class Short(OwnDataset):
        def load_batches(self, index_lists, stream=None):
            return super().load_batches([part[1:] for part in index_lists])

    multi = MultiDataset(listed(PARTS[0]), Short(PARTS[2]))
    with pytest.raises(RuntimeError, match=r"datasets\[1\] \(Short\) must give .*: got 1 for 2"):
        multi.load_batches([[5, 6]])


def test_pinning_reaches_the_children_that_know_it():
    multi = mixed()
    multi.pin_memory = True
    assert multi.datasets[0].reader.pin_memory is True
    assert numbers(multi.load_batches([[0, 5, 6]])) == [[0, 5, 6]]


# Fields on some children only.


def test_strict_children_must_carry_the_same_fields():
    with pytest.raises(
        ValueError, match=r"datasets\[0\] .* has '\w+', datasets\[1\] .*output_strict=False"
    ):
        MultiDataset(listed(PARTS[0]), listed(unlabelled(PARTS[2])))
    loose = MultiDataset(listed(PARTS[0]), listed(unlabelled(PARTS[2])), output_strict=False)
    with pytest.raises(ValueError, match="must carry the same fields"):
        loose.validate_field_names(output_strict=True)
    MultiDataset(listed(PARTS[0]), listed([])).validate_field_names()


@pytest.mark.parametrize("labelled_first", [True, False])
def test_an_absent_label_is_nan_and_never_zero_in_any_order(labelled_first):
    # W5: the peer makes the energy zero, or drops energies and forces of all
    children = [listed(PARTS[0]), listed(unlabelled(PARTS[2]))]
    children = children if labelled_first else children[::-1]
    multi = MultiDataset(*children, output_strict=False)
    assert {"energy", "forces"} <= set(multi.field_names)
    has_label = np.array([True] * 5 + [False] * 4)
    has_label = has_label if labelled_first else has_label[::-1]
    for indices in ([0, 8], [8, 0], [0, 1], [7, 8], list(range(9))):
        (batch,) = multi.load_batches([indices])
        present = torch.from_numpy(has_label[indices].copy())
        assert torch.equal(~batch.energy.squeeze(1).isnan(), present)
        by_atom = present[batch.batch_idx.long()]
        assert torch.equal(~batch.forces.isnan().any(1), by_atom)
        for row, index in enumerate(indices):
            child, local = multi.to_local_index(index)
            source = multi.datasets[child][local][0]
            assert torch.equal(batch[row].positions, source.positions)
            if has_label[index]:
                assert batch[row] == source


@pytest.mark.parametrize("strict", [True, False])
def test_periodic_and_not_periodic_children(strict):
    crystal = [random_structure(2, 3, seed=1, periodic=True)]
    molecule = [random_structure(3, 2, seed=2, periodic=False)]
    multi = MultiDataset(listed_custom(crystal), listed_custom(molecule), output_strict=strict)
    for indices in ([0, 1], [1, 0], [1], [0]):
        (batch,) = multi.load_batches([indices])
        for row, index in enumerate(indices):
            assert torch.equal(batch.pbc[row], crystal[0].pbc[0] & (index == 0))
            assert torch.equal(batch.cell[row], crystal[0].cell[0] * (index == 0))


def listed_custom(structures: list[AtomicData]) -> Dataset:
    reader = ListReader(structures)
    reader.field_levels = {"tag": "atom", "weight": "edge"}
    return Dataset(reader, device="cpu")


def test_absent_integers_and_edges_are_refused_not_invented():
    full = [random_structure(2, 3, seed=1, periodic=False)]
    for name in ("tag", "weight"):
        for strict in (True, False):
            with pytest.raises(
                ValueError,
                match=rf"datasets\[0\] .* has '{name}', datasets\[1\] .* has not, and nothing",
            ) as refusal:
                MultiDataset(
                    listed_custom(full),
                    listed_custom([full[0].replace(**{name: None})]),
                    output_strict=strict,
                )
            assert "output_strict" not in str(refusal.value)


def test_dtypes_of_children_are_never_cast_in_silence():
    double = [data.to(dtype=torch.float64) for data in PARTS[2]]
    for strict in (True, False):
        with pytest.raises(
            ValueError,
            match=r"positions must have one dtype .*float32 and .*float64 in datasets\[0\] .* and "
            r"datasets\[1\] .*transform",
        ):
            MultiDataset(listed(PARTS[0]), listed(double), output_strict=strict)
    same = Dataset(
        ListReader(double), device="cpu", transforms=[lambda d, m: (d.to(dtype=torch.float32), m)]
    )
    assert numbers(MultiDataset(listed(PARTS[0]), same).load_batches([[0, 5]])) == [[0, 6]]


def test_integers_are_given_out_in_the_widest_type():
    narrow = [
        data.replace(
            atomic_numbers=data.atomic_numbers.int(), neighbor_list=data.neighbor_list.int()
        )
        for data in PARTS[2]
    ]
    held = Batch.from_data_list(narrow)
    held.metadata["neighbor_cutoff"] = torch.full((4,), 3.0, dtype=torch.float64)
    multi = MultiDataset(listed(PARTS[0]), InMemoryDataset(held))
    assert multi.get_batch([8, 0, 5]) == Batch.from_data_list([PARTS[2][3], ALL[0], PARTS[2][0]])
    batch = multi.get_batch([8])
    assert batch.neighbor_list.dtype == batch.atomic_numbers.dtype == torch.int64
    assert batch.metadata["neighbor_cutoff"].tolist() == [3.0]
    assert held.neighbor_list.dtype == torch.int32 and "neighbor_cutoff" in held.metadata
    assert multi[8][0] == PARTS[2][3]


def test_stores_are_compared_by_their_schema_at_construction(tmp_path):
    shapes = {"a": torch.zeros(1, 3), "b": torch.zeros(1, 4)}
    for name, value in shapes.items():
        AtomicDataZarrWriter(tmp_path / name).write([PARTS[0][0].replace(extra=value)])
    stores = [Dataset(AtomicDataZarrReader(tmp_path / n), device="cpu") for n in "ab"]
    with pytest.raises(
        ValueError, match=r"extra must .* \[3\] and \[4\] in .*/a\) and .*/b\); pad"
    ):
        MultiDataset(*stores)
    atom = PARTS[0][0].replace()
    atom.add_node_property("extra", torch.zeros(1, 3))
    AtomicDataZarrWriter(tmp_path / "c").write([atom])
    other = Dataset(AtomicDataZarrReader(tmp_path / "c"), device="cpu")
    with pytest.raises(ValueError, match="extra must have one level .* got system and atom"):
        MultiDataset(stores[0], other)


def test_one_sample_has_the_fields_that_it_has_in_a_batch():
    bare = [data.replace(energy=None, forces=None) for data in PARTS[2]]
    crystal = random_structure(2, 1, seed=1, periodic=True)

    multi = MultiDataset(
        listed(PARTS[0]), InMemoryDataset(Batch.from_data_list(bare)), output_strict=False
    )
    for i in range(len(multi)):
        assert multi[i][0] == multi.get_batch([i])[0]
    assert multi[8][0].energy.isnan().all() and multi[0][0] == PARTS[0][0]
    pair = MultiDataset(
        listed_custom([crystal]), listed_custom([crystal.replace(cell=None, pbc=None)])
    )
    assert not pair[1][0].pbc.any() and pair[1][0] == pair.get_batch([1])[0]


# Reading ahead, travelling, closing.


def test_reading_ahead(new_threads):
    with mixed() as multi:
        multi.prefetch(-1)
        multi.prefetch_many([0, 5])
        assert multi.prefetch_count == 3
        assert multi[9] == (ALL[9], {"dataset_index": 2}) and multi[5][1]["own"] == 0
        assert multi.prefetch_count == 1
        multi.cancel_prefetch(0)
        multi.prefetch_fused_batches([[9, 0], [5]])
        multi.prefetch_fused_batches([[1]])
        with pytest.raises(RuntimeError, match="queue is full"):
            multi.prefetch_fused_batches([[2]])
        assert numbers(list(multi.get_fused_batches())) == [[9, 0], [5]]
    assert multi.datasets[0].reader.closed and multi.datasets[1].closed
    assert multi.prefetch_count == 0 and not new_threads()


@pytest.mark.parametrize("prefetch_factor", [0, 1, 3])
def test_a_loader_over_it(prefetch_factor):
    order = [9, 0, 5, 1, 8, 2, 7, 3, 6, 4]
    loader = DataLoader(mixed(), batch_size=4, sampler=order, prefetch_factor=prefetch_factor)
    for _ in range(2):
        batches = list(loader)
        assert numbers(batches) == [order[:4], order[4:8], order[8:]]
        owners = [i for b in batches for i in b.metadata["dataset_index"].tolist()]
        assert owners == [loader.dataset.to_local_index(i)[0] for i in order]


def test_it_travels(tmp_path):
    AtomicDataZarrWriter(tmp_path / "s").write(PARTS[0])
    multi = MultiDataset(
        Dataset(AtomicDataZarrReader(tmp_path / "s"), device="cpu"), OwnDataset(PARTS[2])
    )
    multi.prefetch_fused_batches([[0, 5]])
    again = pickle.loads(pickle.dumps(multi))
    assert again.offsets == multi.offsets and not again.has_pending_fused_batches()
    assert numbers(again.load_batches([[8, 0]])) == [[9, 0]]
    multi.close()
