import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_structures import LEVELS_OF_CUSTOM, molecule, structures, three

from nvalchemi.data import Batch
from nvalchemi.data.ragged import gather_rows, owners, pointers

# Pointers.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms())
def test_ranges_are_gathered_as_python_would(counts, random):
    starts = torch.tensor([random.randrange(50) for _ in counts])
    expected = [s + k for s, c in zip(starts.tolist(), counts) for k in range(c)]
    assert gather_rows(starts, torch.tensor(counts)).tolist() == expected
    assert pointers(torch.tensor(counts)).tolist() == [0, *np.cumsum(counts).tolist()]
    owned = [i for i, count in enumerate(counts) for _ in range(count)]
    assert owners(torch.tensor(counts), sum(counts)).tolist() == owned


@given(structures())
def test_counts_and_pointers(datas):
    batch = Batch.from_data_list(datas)
    nodes, edges = [d.num_nodes for d in datas], [d.num_edges for d in datas]
    assert batch.num_graphs == batch.batch_size == len(batch) == len(datas)
    assert (batch.num_nodes, batch.num_edges) == (sum(nodes), sum(edges))
    assert batch.num_nodes_list == batch.num_nodes_per_graph.tolist() == nodes
    assert batch.num_edges_list == batch.num_edges_per_graph.tolist() == edges
    assert batch.max_num_nodes == max(nodes)
    assert batch.batch_ptr.tolist() == [0, *np.cumsum(nodes).tolist()]
    assert batch.batch_idx.tolist() == [i for i, n in enumerate(nodes) for _ in range(n)]
    assert batch.batch_idx.dtype == batch.batch_ptr.dtype == torch.int32
    assert batch.num_nodes_per_graph.dtype == torch.int64


# Round trips.


@given(structures())
def test_structures_come_back_as_they_went_in(datas):
    batch = Batch.from_data_list(datas)
    assert batch.to_data_list() == datas
    assert [batch[i] for i in range(len(datas))] == datas
    assert batch[-1] == datas[-1] and list(batch) == datas
    assert [set(d.node_properties) for d in batch] == [set(d.node_properties) for d in datas]
    raw = [d.to_dict() for d in datas]
    assert Batch.from_raw_dicts(raw, field_levels=LEVELS_OF_CUSTOM) == batch


@given(structures())
def test_edges_keep_to_their_structure(datas):
    batch = Batch.from_data_list(datas)
    owner = owners(batch.num_edges_per_graph, batch.num_edges)
    assert (batch.batch_idx[batch.neighbor_list].long() == owner.unsqueeze(1)).all()
    first = 0
    for data, edges in zip(datas, batch.neighbor_list.split(batch.num_edges_list)):
        assert torch.equal(edges - first, data.neighbor_list)
        first += data.num_nodes
    batch.validate()


@given(structures(), st.data())
def test_a_selection_is_the_batch_of_the_chosen_structures(datas, draw):
    batch = Batch.from_data_list(datas)
    batch.metadata = {"index": torch.arange(len(datas)) + 100}
    size = len(datas)
    rows = draw.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=8))
    expected = Batch.from_data_list([datas[i] for i in rows])
    for index in (rows, tuple(rows), torch.tensor(rows), np.array(rows), torch.tensor(rows).int()):
        chosen = batch[index]
        assert chosen == expected == batch.index_select(index)
        assert chosen.metadata["index"].tolist() == [100 + i % size for i in rows]


@given(structures(), st.data())
def test_masks_and_slices(datas, draw):
    batch = Batch.from_data_list(datas)
    mask = draw.draw(st.lists(st.booleans(), min_size=len(datas), max_size=len(datas)))
    part = draw.draw(st.slices(len(datas)))
    for index, chosen in (
        (mask, [d for d, m in zip(datas, mask) if m]),
        (torch.tensor(mask), [d for d, m in zip(datas, mask) if m]),
        (np.array(mask), [d for d, m in zip(datas, mask) if m]),
        (part, datas[part]),
    ):
        if chosen:
            assert batch[index] == Batch.from_data_list(chosen)
        else:
            with pytest.raises(IndexError, match="selection is empty"):
                batch[index]


@given(structures(), st.data())
def test_cutting_and_joining_are_inverse(datas, draw):
    batch = Batch.from_data_list(datas)
    batch.metadata = {"index": torch.arange(len(datas))}
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(datas)), max_size=3)) | {len(datas)})
    sizes = np.diff([0, *cuts]).tolist()
    parts = batch.split(sizes)
    assert [part.num_graphs for part in parts] == sizes
    assert parts[-1] == batch[cuts[-2] if len(cuts) > 1 else 0 :]
    whole = Batch.concat(parts)
    assert whole == batch and whole.metadata["index"].tolist() == list(range(len(datas)))


@given(structures())
def test_copies_are_equal_and_whole(datas):
    batch = Batch.from_data_list(datas)
    batch.metadata = {"index": torch.arange(len(datas))}
    for again in (
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        copy.copy(batch),
        batch.clone(),
        batch.contiguous(),
        batch.to("cpu", torch.float64).to("cpu", torch.float32),
    ):
        assert again == batch and again.batch_ptr.tolist() == batch.batch_ptr.tolist()
        assert again.metadata["index"].tolist() == batch.metadata["index"].tolist()


# Concatenated fields.


def arrays() -> dict[str, object]:
    return {
        "atom": {"positions": torch.zeros(3, 3), "atomic_numbers": torch.tensor([1, 6, 8])},
        "edge": {"neighbor_list": torch.tensor([[0, 1], [1, 0], [0, 0]])},
        "system": {"energy": torch.zeros(2, 1)},
        "num_nodes": torch.tensor([2, 1]),
        "num_edges": torch.tensor([2, 1]),
    }


def test_from_arrays_with_local_and_global_neighbours():
    local = Batch.from_arrays(**arrays(), local_neighbors=True)
    assert local.neighbor_list.tolist() == [[0, 1], [1, 0], [2, 2]]
    assert local[1].neighbor_list.tolist() == [[0, 0]]
    same = Batch.from_arrays(**{**arrays(), "edge": {"neighbor_list": local.neighbor_list}})
    assert same == local
    with pytest.raises(ValueError, match="structure 1 of the batch points to atoms of another"):
        Batch.from_arrays(**arrays()).validate()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_nodes": torch.tensor([2, 2])}, "atoms in positions: expected 4, got 3"),
        ({"num_edges": torch.tensor([2, 2])}, "edges in neighbor_list: expected 4, got 3"),
        ({"num_edges": torch.tensor([3])}, r"\[B\] with B >= 1"),
        ({"atom": {"positions": torch.zeros(3, 3)}}, "a batch needs atomic_numbers"),
        ({"system": {"forces": torch.zeros(3, 3)}}, "forces is a field of the atom"),
        ({"system": {"energy": torch.zeros(2)}}, r"energy must have shape \[B, 1\]: got \[2\]"),
        ({"system": {"energy": torch.zeros(2, 1, device="meta")}}, "energy is on meta"),
        ({"metadata": {"index": torch.arange(3)}}, "one entry for each of 2 structures"),
    ],
)
def test_from_arrays_refuses_what_does_not_fit(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batch.from_arrays(**{**arrays(), **change})


def test_other_edges():
    batch = Batch.from_data_list(three())
    edges = torch.tensor([[0, 2], [4, 5], [5, 4]])
    new = batch.with_edges(torch.tensor([1, 0, 2]), {"neighbor_list": edges})
    assert new.num_edges_list == [1, 0, 2] and new[2].neighbor_list.tolist() == [[0, 1], [1, 0]]
    assert "weight" not in new and "weight" in batch


def test_edge_ptr_of_a_sorted_list():
    batch = Batch.from_arrays(**arrays(), local_neighbors=True)
    assert batch.edge_ptr.tolist() == [0, 1, 2, 3] and batch.edge_ptr.dtype == torch.int32
    batch.neighbor_list = torch.tensor([[0, 1], [0, 0], [2, 2]])
    assert batch.edge_ptr.tolist() == [0, 2, 2, 3]
    with pytest.raises(AttributeError, match="edge_ptr"):
        _ = Batch.from_data_list([molecule(1, neighbor_list=None)]).edge_ptr


# Reading and setting fields.


def test_fields_by_name_and_level():
    batch = Batch.from_data_list(three())
    assert batch["energy"] is batch.energy and batch.energy.shape == (3, 1)
    assert batch.cell.shape == (3, 3, 3) and batch.pbc.shape == (3, 3)
    assert batch.keys["node"] == {"atomic_numbers", "positions", "forces", "tag"}
    assert batch.keys["edge"] == {"neighbor_list", "neighbor_list_shifts", "weight"}
    assert batch.keys["system"] == {"energy", "temperature", "cell", "pbc"}
    assert set(batch.fields("node")) == set(batch.fields("atom"))
    assert set(batch.model_dump()) == set().union(*batch.keys.values())
    assert getattr(batch, "stress", None) is None and not hasattr(batch, "stress")
    with pytest.raises(AttributeError, match="Batch has no field 'stress': it holds"):
        _ = batch.stress
    with pytest.raises(ValueError, match="level must be 'atom'"):
        batch.fields("graph")


def test_setting_fields():
    batch = Batch.from_data_list(three())
    batch.stress = torch.ones(3, 3, 3)
    batch.forces = torch.ones(6, 3)
    assert batch[2].forces.tolist() == [[1.0] * 3] * 2 and "stress" in batch.keys["system"]
    batch.tag = torch.arange(6)
    assert batch[1].tag.tolist() == [3]
    for name, value, error, sentence in (
        ("energy", torch.zeros(2, 1), ValueError, "structures in energy: expected 3, got 2"),
        ("forces", torch.zeros(6), ValueError, "forces must have shape"),
        ("energy", None, TypeError, "energy must be a torch.Tensor: got NoneType"),
        ("energy", torch.zeros(3, 1, device="meta"), ValueError, "energy is on meta"),
        ("num_nodes", 3, AttributeError, "num_nodes follows from the structures"),
        ("colour", torch.zeros(3), AttributeError, r"add it with add_key\(name, values, level"),
        ("metadata", {"index": torch.arange(2)}, ValueError, "each of 3 structures"),
        ("metadata", {"index": [1, 2, 3]}, TypeError, "must be a tensor: got list"),
    ):
        with pytest.raises(error, match=sentence):
            setattr(batch, name, value)
    bare = molecule(2).replace(neighbor_list=None, neighbor_list_shifts=None, weight=None)
    bare = Batch.from_data_list([bare])
    with pytest.raises(ValueError, match="the batch has none: use with_edges"):
        bare.neighbor_list = torch.tensor([[0, 1]])


def test_a_new_batch_with_other_fields_leaves_the_old_one():
    batch = Batch.from_data_list(three())
    new = batch.with_fields("system", {"energy": torch.ones(3, 1)})
    shallow = copy.copy(batch)
    shallow.energy = torch.full((3, 1), 5.0)
    assert new.energy.eq(1).all() and not batch.energy.eq(1).any()
    assert not batch.energy.eq(5).any() and new.positions is batch.positions
    with pytest.raises(ValueError, match="energy is a field of the system"):
        batch.with_fields("atom", {"energy": torch.ones(6, 1)})


def test_custom_fields_one_tensor_per_structure():
    batch = Batch.from_data_list(three())
    batch.add_key("mass", [torch.full((n,), float(n)) for n in (3, 1, 2)])
    batch.add_key("score", [torch.zeros(1)] * 3, level="system")
    batch.add_key("bond", [torch.zeros(e) for e in (4, 0, 5)], level="edge")
    assert batch.mass.tolist() == [3.0, 3.0, 3.0, 1.0, 2.0, 2.0]
    assert batch[2].mass.tolist() == [2.0, 2.0] and batch[0].bond.shape == (4,)
    assert "mass" in batch.keys["node"] and "bond" in batch.keys["edge"]
    with pytest.raises(ValueError, match="has a field 'mass': pass overwrite=True"):
        batch.add_key("mass", [torch.zeros(n) for n in (3, 1, 2)])
    batch.add_key("mass", [torch.zeros(n) for n in (3, 1, 2)], overwrite=True)
    assert batch.mass.eq(0).all()
    for values in ([torch.zeros(2)] * 3, [torch.zeros(3)]):
        with pytest.raises(ValueError, match="mass of structure 0|must hold 3 tensors"):
            batch.add_key("mass", values, overwrite=True)
    for name in ("keys", "split", "metadata", "_cache"):
        with pytest.raises(ValueError, match="can not name a field"):
            batch.add_key(name, [torch.zeros(1)] * 3, level="system")


def test_append_is_in_place_and_takes_metadata_along():
    batch, other = Batch.from_data_list(three()), Batch.from_data_list(three()[:1])
    batch.metadata, other.metadata = {"index": torch.arange(3)}, {"index": torch.tensor([9])}
    batch.append(other)
    assert batch == Batch.from_data_list([*three(), three()[0]])
    assert batch.metadata["index"].tolist() == [0, 1, 2, 9] and batch.batch_ptr[-1] == 9
    batch.append(batch)
    assert batch.num_graphs == 8


def test_to_is_the_batch_itself_only_when_every_field_is_there():
    batch = Batch.from_data_list(three())
    assert batch.to("cpu") is batch and batch.to("cpu", torch.float32) is batch
    batch.energy = batch.energy.double()
    moved = batch.to("cpu", torch.float32)
    assert moved.energy.dtype == torch.float32 and batch.energy.dtype == torch.float64
    assert batch.to("meta").batch_idx.device.type == "meta"
    with pytest.raises(ValueError, match="dtype must be a floating-point one"):
        batch.to("cpu", torch.int32)


def test_the_structures_handed_out_can_not_break_the_counts():
    batch = Batch.from_data_list(three())
    batch[0].neighbor_list.add_(1)
    assert batch.to_data_list() == three()


def test_values_that_shapes_do_not_tell():
    raws = [{"positions": torch.zeros(1, 3), "atomic_numbers": torch.tensor([0])}]
    with pytest.raises(ValueError, match="1..118: got 0"):
        Batch.from_raw_dicts(raws).validate()


def test_equality_sees_where_structures_end():
    atoms = {"positions": torch.zeros(3, 3), "atomic_numbers": torch.ones(3, dtype=torch.int64)}
    first, second = (Batch.from_arrays(atoms, {}, {}, torch.tensor(n)) for n in ([1, 2], [2, 1]))
    assert first != second and first == first.clone() and first != "batch"
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)


def test_repr_names_the_fields():
    assert "3 structures, 6 atoms, 9 edges" in repr(Batch.from_data_list(three()))
