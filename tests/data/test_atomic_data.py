import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from random_structures import structures

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.fields import FIELDS, LABELS


def water(**fields: torch.Tensor) -> AtomicData:
    given = {"atomic_numbers": torch.tensor([8, 1, 1]), "positions": torch.rand(3, 3)}
    return AtomicData(**{**given, **fields})


def full_field(name: str, atoms: int = 3, edges: int = 4) -> torch.Tensor:
    field = FIELDS[name]
    lead = {"atom": atoms, "edge": edges, "system": 1}[field.level]
    shape = (lead, *(5 if size is None else size for size in field.shape))
    kind = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}[field.kind]
    return torch.ones(shape).to(kind)


def test_every_field_of_the_table_in_its_shape():
    data = AtomicData(**{name: full_field(name) for name in FIELDS})
    assert (data.num_nodes, data.num_edges) == (3, 4)
    levels = (data.node_properties, data.edge_properties, data.system_properties)
    assert sorted(name for level in levels for name in level) == sorted(FIELDS)
    assert data.energy.shape == (1, 1) and data.stress.shape == (1, 3, 3)
    assert data.dipole.shape == (1, 3) and data.pbc.dtype == torch.bool
    assert "cell" in data.system_properties and "shifts" in data.edge_properties


def test_no_field_is_hidden_by_an_attribute_of_the_classes():
    assert [n for n in FIELDS if hasattr(AtomicData, n) or hasattr(Batch, n)] == []


def test_nothing_is_filled_in():
    data = water()
    absent = set(FIELDS) - {"atomic_numbers", "positions"}
    assert {name for name in absent if getattr(data, name) is not None} == set()
    assert set(data.to_dict()) == {"atomic_numbers", "positions"}
    assert not any(label in data for label in LABELS)
    assert (data.num_edges, data.info) == (0, {})


def test_an_unknown_name_is_an_attribute_error_that_lists_the_fields():
    with pytest.raises(AttributeError, match="no field 'enregy': it holds atomic_numbers"):
        _ = water().enregy
    assert not hasattr(water(), "enregy") and hasattr(water(), "energy")


@pytest.mark.parametrize("missing", ["atomic_numbers", "positions"])
def test_required_fields(missing):
    fields = {"atomic_numbers": torch.tensor([1]), "positions": torch.zeros(1, 3)}
    with pytest.raises(TypeError, match=f"AtomicData needs {missing}"):
        AtomicData(**{**fields, missing: None})
    with pytest.raises(ValueError, match=f"{missing} can not be removed"):
        setattr(water(), missing, None)
    with pytest.raises(ValueError, match=f"{missing} can not be removed"):
        water().replace(**{missing: None})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("forces", torch.zeros(2, 3), "atoms in forces: expected 3, got 2"),
        ("positions", torch.zeros(4, 3), "atoms in positions: expected 3, got 4"),
        ("positions", torch.zeros(3, 2), r"shape \[V, 3\]: got \[3, 2\]"),
        ("positions", torch.zeros(3, 3, dtype=torch.int64), "positions must be float"),
        ("atomic_numbers", torch.ones(3), "atomic_numbers must be int: got torch.float32"),
        ("atomic_numbers", torch.ones(3, dtype=torch.bool), "atomic_numbers must be int"),
        ("atomic_numbers", torch.tensor([1, 0, 1]), "1..118: got 0"),
        ("atomic_numbers", torch.tensor([1, 119, 1]), "1..118: got 119"),
        ("energy", torch.zeros(1), r"energy must have shape \[1, 1\]: got \[1\]"),
        ("energy", torch.tensor(1.0), "leading axis over structures: got a scalar"),
        ("energy", torch.zeros(2, 1), "structures in energy: expected 1, got 2"),
        ("energy", torch.zeros(1, 1, dtype=torch.complex64), "energy must be float"),
        ("stress", torch.zeros(3, 3), r"stress must have shape \[1, 3, 3\]"),
        ("stress", torch.zeros(1, 6), r"stress must have shape \[1, 3, 3\]: got \[1, 6\]"),
        ("cell", torch.eye(3), r"cell must have shape"),
        ("pbc", torch.ones(1, 3), "pbc must be bool: got torch.float32"),
        ("neighbor_list", torch.zeros(2, 4, dtype=torch.int64), r"\[E, 2\]: got \[2, 4\]"),
        ("neighbor_list", torch.tensor([[0, 3]]), "atom indices in 0..2: got 3"),
        ("neighbor_list", torch.tensor([[0, -1]]), "atom indices in 0..2: got -1"),
        ("neighbor_list", torch.zeros(1, 2, dtype=torch.int16), "must be int32 or int64"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_given_and_where_it_is_set(name, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        water(**{"forces": torch.zeros(3, 3), name: value})
    data = water(forces=torch.zeros(3, 3))
    before = data.clone()
    with pytest.raises(ValueError, match=sentence):
        setattr(data, name, value)
    assert data == before, "a refused value must not stay behind"


def test_values_that_are_no_tensors_are_refused():
    with pytest.raises(TypeError, match="energy must be a torch.Tensor: got float"):
        water(energy=-1.0)
    with pytest.raises(TypeError, match="forces must be a torch.Tensor: got ndarray"):
        water(forces=torch.zeros(3, 3).numpy())


def test_edges_agree_in_number():
    edges = torch.tensor([[0, 1], [1, 0]])
    data = water(neighbor_list=edges, neighbor_list_shifts=torch.zeros(2, 3, dtype=torch.int64))
    assert data.num_edges == 2
    with pytest.raises(ValueError, match="edges in shifts: expected 2, got 3"):
        data.shifts = torch.zeros(3, 3)
    none = water(neighbor_list=torch.zeros(0, 2, dtype=torch.int64))
    assert none.num_edges == 0 and none.neighbor_list.shape == (0, 2)


def test_float_fields_follow_the_positions_with_one_warning():
    fields = {"energy": torch.ones(1, 1).half(), "charge": torch.ones(1, 1).half()}
    with pytest.warns(
        UserWarning, match="(energy|charge) is cast from torch.float16 to torch.float32"
    ):
        data = water(**fields)
    assert (data.energy.dtype, data.charge.dtype, data.dtype) == (torch.float32,) * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        water(**fields)


def test_precision_preserving_keys_keep_their_dtype():
    class Precise(AtomicData):
        precision_preserving_keys = frozenset({"energy"})

    data = Precise(
        atomic_numbers=torch.tensor([1]),
        positions=torch.zeros(1, 3),
        energy=torch.ones(1, 1, dtype=torch.float64),
    )
    assert data.energy.dtype == torch.float64


def test_positions_of_another_dtype_bring_the_others_along_and_are_not_cut():
    data = water(forces=torch.rand(3, 3))
    fine = torch.rand(3, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.positions = fine
    assert torch.equal(data.positions, fine)
    assert data.forces.dtype == data.dtype == torch.float64


def test_devices_are_never_mixed():
    with pytest.raises(ValueError, match="one device: forces is on meta, atomic_numbers on cpu"):
        water(forces=torch.zeros(3, 3, device="meta"))
    with pytest.raises(ValueError, match="one device: positions is on meta"):
        water(positions=torch.zeros(3, 3, device="meta"))


def test_custom_fields():
    data = water(temperature=torch.tensor([300.0]))
    data.add_node_property("tag", torch.tensor([0, 1, 1]))
    data.add_edge_property("weight", torch.rand(5))
    data.add_system_property("spectrum", torch.rand(1, 7))
    assert (data.temperature.item(), data["tag"].tolist()) == (300.0, [0, 1, 1])
    assert data.num_edges == 5
    assert set(data.system_properties) == {"temperature", "spectrum"}
    data.tag = torch.tensor([4, 5, 6])
    assert data.node_properties["tag"].tolist() == [4, 5, 6], "a custom field keeps its level"
    with pytest.raises(ValueError, match="unknown field 'tags' .* add_node_property"):
        water(tags=torch.tensor([0, 1, 1]))


def test_a_known_field_has_its_level():
    with pytest.raises(ValueError, match="energy is a field of the system"):
        water().add_node_property("energy", torch.zeros(3, 1))
    with pytest.raises(ValueError, match="charges is a field of the atom"):
        AtomicData(
            atomic_numbers=torch.tensor([1]), positions=torch.zeros(1, 3)
        ).add_system_property("charges", torch.zeros(1))


@pytest.mark.parametrize("name", ["num_nodes", "to", "replace", "_values", "device", "fields"])
def test_custom_names_that_could_not_be_read_back_are_refused(name):
    with pytest.raises(ValueError, match="can not name a field"):
        water(**{name: torch.zeros(1)})
    data = water()
    with pytest.raises((ValueError, AttributeError), match="can not"):
        setattr(data, name, torch.zeros(1))
    assert data.num_nodes == 3


def test_info_travels_but_is_no_field():
    data = AtomicData(
        atomic_numbers=torch.tensor([1]), positions=torch.zeros(1, 3), info={"t": torch.ones(2)}
    )
    assert data.clone().info["t"].tolist() == [1, 1] and "t" not in data
    assert data.to("cpu").info and "info" not in Batch.from_data_list([data])


def test_replace_changes_several_fields_at_once():
    data = water(forces=torch.zeros(3, 3), neighbor_list=torch.tensor([[0, 2]]))
    smaller = data.replace(
        positions=torch.zeros(2, 3),
        forces=torch.ones(2, 3),
        atomic_numbers=torch.tensor([1, 1]),
        neighbor_list=None,
    )
    assert (smaller.num_nodes, smaller.num_edges, data.num_nodes) == (2, 0, 3)
    assert smaller.neighbor_list is None and data.neighbor_list is not None
    with pytest.raises(ValueError, match="expected 3, got 2"):
        data.replace(positions=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="atom indices in 0..1: got 2"):
        data.replace(positions=torch.zeros(2, 3), forces=None, atomic_numbers=torch.tensor([1, 1]))
    data.add_node_property("tag", torch.tensor([0, 1, 2]))
    assert "tag" in data.replace(tag=torch.tensor([3, 4, 5])).node_properties
    assert data.tag.tolist() == [0, 1, 2]


def test_to_moves_floats_only_and_is_itself_when_nothing_changes():
    data = water(pbc=torch.ones(1, 3, dtype=torch.bool), energy=torch.zeros(1, 1))
    wide = data.to(dtype=torch.float64)
    assert (wide.dtype, wide.energy.dtype) == (torch.float64, torch.float64)
    assert wide.pbc.dtype == torch.bool and wide.atomic_numbers.dtype == torch.int64
    assert data.to("cpu", torch.float32) is data
    assert data.to("meta").energy.device.type == "meta"
    with pytest.raises(ValueError, match="dtype must be a floating-point one: got torch.int64"):
        data.to(dtype=torch.int64)


def test_clone_shares_nothing_and_a_shallow_copy_is_not_changed_by_setting():
    data = water(energy=torch.zeros(1, 1))
    other, shallow, deep = data.clone(), copy.copy(data), copy.deepcopy(data)
    data.positions.add_(1)
    assert not torch.equal(other.positions, data.positions)
    assert not torch.equal(deep.positions, data.positions)
    shallow.energy = torch.ones(1, 1)
    assert data.energy.item() == 0 and shallow.positions is data.positions


@given(structures(max_size=2))
def test_round_trips_keep_every_field(datas):
    data = datas[0]
    for again in (
        pickle.loads(pickle.dumps(data)),
        copy.deepcopy(data),
        data.clone(),
        data.replace(),
        data.to(dtype=torch.float64).to(dtype=torch.float32),
    ):
        assert again == data and hash(again) == hash(data)
        assert set(again.node_properties) == set(data.node_properties)


def test_equality_sees_labels_and_dtypes_and_the_hash_only_the_chemistry():
    first = water(energy=torch.zeros(1, 1))
    other = first.replace(energy=torch.ones(1, 1))
    assert first != other and first.chemical_hash == other.chemical_hash
    assert first != first.to(dtype=torch.float64)
    assert first != first.replace(energy=None) and first != "water"
    moved = first.replace(positions=first.positions + 1)
    assert moved.chemical_hash != first.chemical_hash
    boxed = first.replace(cell=torch.eye(3)[None])
    assert boxed.chemical_hash != first.chemical_hash
    nan = first.replace(energy=torch.full((1, 1), torch.nan))
    assert nan == nan.clone()


def test_equal_structures_have_equal_hashes_also_with_signed_zeros():
    plus, minus = (water(positions=torch.zeros(3, 3) * sign) for sign in (1, -1))
    assert plus == minus and hash(plus) == hash(minus)


def test_reading_by_name_iteration_and_repr():
    data = water(energy=torch.zeros(1, 1))
    assert data["energy"] is data.energy and data["forces"] is None
    assert dict(data) == data.to_dict() == data.model_dump()
    assert "3 atoms, 0 edges" in repr(data) and "energy[1, 1]" in repr(data)
