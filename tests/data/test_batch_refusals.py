"""What a Batch refuses instead of guessing: bad indices, labels on some, mixed kinds."""

import numpy as np
import pytest
import torch
from random_structures import LEVELS_OF_CUSTOM, molecule, random_structure, three

from nvalchemi.data import AtomicData, Batch


@pytest.mark.parametrize(
    "index",
    [[], 1.0, [1.0], torch.tensor([0.0]), None, ["a"], True, [True], [[0]], 3, -4, [0, 3], 10**30,
     [10**30], slice(2, 2), torch.zeros(3, dtype=torch.bool), torch.tensor([1j]), [0, 1.5]],
)  # fmt: skip
def test_bad_indices_are_index_errors(index):
    with pytest.raises(IndexError):
        Batch.from_data_list(three())[index]


@pytest.mark.parametrize("index", [1, -2, np.int64(1), np.int32(-2), torch.tensor(1)])
def test_one_integer_of_any_kind_gives_the_structure(index):
    assert Batch.from_data_list(three())[index] == three()[1]


def test_a_list_or_tensor_of_one_gives_a_batch():
    batch = Batch.from_data_list(three())
    for index in ([1], torch.tensor([1]), np.array([1]), slice(1, 2)):
        assert isinstance(batch[index], Batch) and batch[index].num_graphs == 1


@pytest.mark.parametrize("sizes", [[], [4], [1, 1], [3, 0], [4, -1], [2, 2]])
def test_bad_sizes_of_a_cut(sizes):
    with pytest.raises(ValueError, match="sizes must be positive and sum to 3"):
        Batch.from_data_list(three()).split(sizes)


def test_empty_and_foreign_lists():
    with pytest.raises(ValueError, match="at least one structure"):
        Batch.from_data_list([])
    with pytest.raises(ValueError, match="at least one structure"):
        Batch.from_raw_dicts([])
    with pytest.raises(TypeError, match=r"data_list\[1\] must be AtomicData: got dict"):
        Batch.from_data_list([molecule(1), molecule(1).to_dict()])
    with pytest.raises(ValueError, match="got no batches"):
        Batch.concat([])
    assert Batch.from_data_list(iter([molecule(2)])).num_graphs == 1


@pytest.mark.parametrize("labelled_first", [True, False])
def test_a_label_on_some_structures_is_never_dropped_nor_invented(labelled_first):
    # W5: the peer drops the labels of the second structure, or makes them zero
    pair = [molecule(2), molecule(3, energy=None, forces=None)]
    datas = pair if labelled_first else pair[::-1]
    without = "1" if labelled_first else "0"
    with pytest.raises(ValueError, match=f"(energy|forces) is on 1 of 2, not on {without}"):
        Batch.from_data_list(datas)
    with pytest.raises(ValueError, match="(energy|forces) is on 1 of 2"):
        Batch.from_raw_dicts([d.to_dict() for d in datas], field_levels=LEVELS_OF_CUSTOM)
    batches = [Batch.from_data_list([d]) for d in datas]
    with pytest.raises(ValueError, match="(energy|forces) is on 1 of 2"):
        Batch.concat(batches)
    filled = Batch.concat(batches, fill_missing=True)
    missing = int(without)
    assert filled.energy[missing].isnan().all() and not filled.energy[1 - missing].isnan().any()
    assert filled[missing].forces.isnan().all()


def test_integers_and_edges_can_not_be_filled():
    first = Batch.from_data_list([molecule(2, 3)])
    other = Batch.from_data_list([molecule(2, 3).replace(tag=None)])
    with pytest.raises(ValueError, match="tag is on 1 of 2"):
        Batch.concat([first, other], fill_missing=True)
    other = Batch.from_data_list([molecule(2, 3).replace(weight=None)])
    with pytest.raises(ValueError, match="weight is on 1 of 2"):
        Batch.concat([first, other], fill_missing=True)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_periodic_beside_not_periodic(order):
    crystal = random_structure(2, 3, seed=1, periodic=True)
    datas = [crystal, molecule(3, 2)][order]
    expected = [d.pbc if d.pbc is not None else torch.zeros(1, 3, dtype=torch.bool) for d in datas]
    cells = [d.cell if d.cell is not None else torch.zeros(1, 3, 3) for d in datas]
    joined = Batch.concat([Batch.from_data_list([d]) for d in datas])
    for batch in (Batch.from_data_list(datas), joined):
        assert torch.equal(batch.pbc, torch.cat(expected)) and batch.pbc.dtype == torch.bool
        assert torch.equal(batch.cell, torch.cat(cells))


def test_a_periodic_structure_never_gets_a_cell_of_zeros():
    crystal = random_structure(2, 3, seed=1, periodic=True)
    torn = molecule(3, 2, pbc=torch.tensor([[True, False, False]]))
    with pytest.raises(ValueError, match="a periodic structure needs a cell"):
        Batch.from_data_list([crystal, torn])
    with pytest.raises(ValueError, match="a periodic structure needs a cell"):
        Batch.concat([Batch.from_data_list([d]) for d in (crystal, torn)])


def test_dtypes_shapes_and_levels_are_never_mixed():
    single, double = molecule(2), molecule(3).to(dtype=torch.float64)
    with pytest.raises(ValueError, match="must have one dtype in a batch: got torch.float32"):
        Batch.from_data_list([single, double])
    with pytest.raises(ValueError, match="must have one dtype in a batch"):
        Batch.concat([Batch.from_data_list([d]) for d in (single, double)])
    narrow, wide = (molecule(2, node_attrs=torch.zeros(2, n)) for n in (3, 4))
    with pytest.raises(ValueError, match=r"node_attrs must have the same axes .* \[3\] and \[4\]"):
        Batch.from_data_list([narrow, wide])
    atoms, system = molecule(1), molecule(1)
    atoms.add_node_property("x", torch.zeros(1))
    system.add_system_property("x", torch.zeros(1))
    with pytest.raises(ValueError, match="x must have one level in a batch"):
        Batch.from_data_list([atoms, system])
    with pytest.raises(ValueError, match="x must have one level"):
        Batch.concat([Batch.from_data_list([d]) for d in (atoms, system)])


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"energy": torch.tensor(1.0)}, ValueError, "energy of structure 1 .* got a scalar"),
        ({"energy": 1.0}, TypeError, "energy of structure 1 must be a torch.Tensor: got float"),
        ({"energy": torch.zeros(2, 1)}, ValueError, "energy of structure 1 has 2 rows"),
        ({"forces": torch.zeros(3, 3)}, ValueError, "forces of structure 1 has 3 rows: expected 2"),
        ({"positions": None}, ValueError, "structure 1 must have positions"),
        ({"energy": None}, ValueError, "energy is on 1 of 2"),
    ],
)
def test_raw_dicts_are_checked(change, error, sentence):
    raws = [molecule(2).to_dict(), {**molecule(2).to_dict(), **change}]
    for raw in raws:
        raw.pop("tag"), raw.pop("weight")
    with pytest.raises(error, match=sentence):
        Batch.from_raw_dicts(raws)


def test_raw_dicts_none_is_absent_and_other_values_can_be_left_out():
    raw = {**molecule(2).to_dict(), "energy": None, "smiles": "CO"}
    levels = LEVELS_OF_CUSTOM
    batch = Batch.from_raw_dicts([raw, raw], exclude_keys=["smiles"], field_levels=levels)
    assert "energy" not in batch and "smiles" not in batch and batch.num_graphs == 2


@pytest.mark.parametrize("name", ["device", "num_nodes", "info", "metadata", "_p"])
def test_names_that_a_batch_uses_itself_are_refused(name):
    plain = {"positions": torch.zeros(2, 3), "atomic_numbers": torch.ones(2).long()}
    raw = {**plain, name: torch.zeros(1, 1)}
    with pytest.raises(ValueError, match=f"{name!r} can not name a field: Batch uses it"):
        Batch.from_raw_dicts([raw])
    with pytest.raises(ValueError, match="can not name a field"):
        Batch.from_arrays(plain, {}, {name: torch.zeros(1, 1)}, torch.tensor([2]))


def test_negative_counts_are_refused_though_their_sum_is_right():
    atom = {"positions": torch.zeros(2, 3), "atomic_numbers": torch.ones(2).long()}
    with pytest.raises(ValueError, match="num_nodes must be >= 1: got -1 for structure 1"):
        Batch.from_arrays(atom, {}, {}, torch.tensor([3, -1]))
    batch = Batch.from_arrays(atom, {}, {}, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="num_edges must be >= 0: got -2 for structure 0"):
        batch.with_edges(torch.tensor([-2, 2]), {})


def test_structures_without_atoms_are_refused():
    nothing = {"positions": torch.zeros(0, 3), "atomic_numbers": torch.zeros(0).long()}
    with pytest.raises(ValueError, match="a structure must have at least one atom"):
        AtomicData(**nothing)
    with pytest.raises(ValueError, match="a structure must have at least one atom"):
        AtomicData(**{name: molecule(2)[name] for name in nothing}).replace(**nothing)
    with pytest.raises(ValueError, match="num_nodes must be >= 1: got 0 for structure 1; leave it"):
        Batch.from_raw_dicts([{name: molecule(2)[name] for name in nothing}, nothing])
    atom = {"positions": torch.zeros(2, 3), "atomic_numbers": torch.ones(2).long()}
    with pytest.raises(ValueError, match="num_nodes must be >= 1: got 0 for structure 0"):
        Batch.from_arrays(atom, {}, {}, torch.tensor([0, 2]))
