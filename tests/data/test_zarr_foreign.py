"""Stores of the peer, made here array by array, and what the peer finds in ours."""

import numpy as np
import pytest
import torch
import zarr
from store_cases import chain, structure

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.zarr_store import AtomicDataZarrReader, AtomicDataZarrWriter


def peer_store(path, neighbours=((0, 1), (1, 0), (3, 4))):
    """3 + 2 + 1 atoms, 2 + 1 + 0 edges; default-filled masses and velocities, Zarr's own chunks."""
    root = zarr.open_group(path, mode="w", zarr_format=3)
    rng = np.random.default_rng(0)
    meta = {
        "atoms_ptr": np.array([0, 3, 5, 6]),
        "edges_ptr": np.array([0, 2, 3, 3]),
        "samples_mask": np.array([True, True, True]),
        "atoms_mask": np.ones(6, bool),
        "edges_mask": np.ones(3, bool),
    }
    core = {
        "atomic_numbers": ("atom", np.array([29, 29, 29, 47, 47, 79], np.int32)),
        "atomic_masses": ("atom", np.full(6, 63.5, np.float32)),
        "atom_categories": ("atom", np.zeros(6, np.int64)),
        "positions": ("atom", rng.random((6, 3), np.float32)),
        "velocities": ("atom", np.zeros((6, 3), np.float32)),
        "neighbor_list": ("edge", np.array(neighbours)),
        "cell": ("system", rng.random((3, 3, 3), np.float32)),
        "pbc": ("system", np.ones((3, 3), bool)),
        "energy": ("system", rng.random((3, 1), np.float32)),
    }
    for name, value in meta.items():
        root.create_array(f"meta/{name}", data=value)
    for name, (_, value) in core.items():
        root.create_array(f"core/{name}", data=value)
    root.create_array("custom/fold", data=np.array([[4], [5], [6]]))
    root.attrs["num_samples"] = 3
    root.attrs["fields"] = {
        "core": {name: level for name, (level, _) in core.items()},
        "custom": {"fold": "system"},
    }
    return root


def test_a_store_of_the_peer_is_read(tmp_path):
    root = peer_store(tmp_path / "p.zarr")
    reader = AtomicDataZarrReader(tmp_path / "p.zarr")
    assert len(reader) == 3 and reader.num_nodes_per_sample.tolist() == [3, 2, 1]
    batch = reader.read_batch([2, 1, 0])
    assert batch.atomic_numbers.tolist() == [79, 47, 47, 29, 29, 29]
    assert batch.neighbor_list.tolist() == [[1, 2], [3, 4], [4, 3]]
    assert batch.fields("system")["fold"].tolist() == [[6], [5], [4]]
    np.testing.assert_array_equal(batch.energy.numpy(), root["core/energy"][:][::-1])
    raw, _ = reader.read(1)
    assert raw["neighbor_list"].tolist() == [[0, 1]] and raw["energy"].shape == (1, 1)
    assert raw["pbc"].dtype == torch.bool and raw["atomic_numbers"].dtype == torch.int32
    reader.check_integrity()


def test_a_store_of_the_peer_is_appended_to_thinned_and_tidied(tmp_path):
    path = tmp_path / "p.zarr"
    root = peer_store(path)
    writer = AtomicDataZarrWriter(path)
    reader = AtomicDataZarrReader(path)
    old = reader.read_batch([0, 1, 2]).to_data_list()
    with pytest.raises(ValueError, match="lacks 'atom_categories', which the store keeps"):
        writer.append(chain(2))
    writer.append(old[:2])
    writer.delete([0])
    reader.refresh()
    assert reader.read_batch(range(4)) == Batch.from_data_list([*old[1:], *old[:2]])
    assert root["core/neighbor_list"].shape[0] == 6 and reader.get_metadata(3) == (2, 1)
    writer.defragment()
    with pytest.raises(RuntimeError, match="refresh"):
        reader.read_batch([0])
    reader.refresh()
    assert reader.read_batch(range(4)) == Batch.from_data_list([*old[1:], *old[:2]])


def test_neighbours_that_the_peer_numbered_wrongly_are_refused(tmp_path):
    # its append leaves the numbers of the appended batch: 0-1 where the second structure has 3-4
    peer_store(tmp_path / "p.zarr", neighbours=((0, 1), (1, 0), (0, 1)))
    reader = AtomicDataZarrReader(tmp_path / "p.zarr")
    assert reader.read_batch([0, 2]).neighbor_list.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match=r"structure 1 points to atoms -3..-2 of its 2: .*corrupt"):
        reader.read_batch([0, 1])
    with pytest.raises(ValueError, match="corrupt"):
        reader.check_integrity()


def test_samples_that_the_peer_shifted_are_refused(tmp_path):
    # its append of an unlabelled structure lets the pointers grow and the labels not
    root = peer_store(tmp_path / "p.zarr")
    root["core/energy"].resize((2, 1))
    with pytest.raises(ValueError, match=r"core/energy has 2 rows .* need 3"):
        AtomicDataZarrReader(tmp_path / "p.zarr")


def test_levels_of_its_own_are_reported(tmp_path):
    root = peer_store(tmp_path / "p.zarr")
    root.attrs["fields"] = {**root.attrs["fields"], "levels": {"bond": {"order": "bond"}}}
    with pytest.warns(UserWarning, match="levels of its own"):
        reader = AtomicDataZarrReader(tmp_path / "p.zarr")
    writer = AtomicDataZarrWriter(tmp_path / "p.zarr")
    for change in (lambda: writer.append(reader.read_batch([0])), writer.defragment):
        with pytest.raises(ValueError, match="levels of its own"):
            change()


def test_our_store_has_the_layout_that_the_peer_reads(tmp_path):
    structures = [structure(n, n, seed=n) for n in (3, 2)]
    writer = AtomicDataZarrWriter(tmp_path / "s.zarr")
    writer.write(structures[:1])
    writer.append(structures[1])
    writer.add_custom("fold", torch.tensor([[0], [1]]), "system")
    root = zarr.open_group(tmp_path / "s.zarr", mode="r")
    assert root.metadata.zarr_format == 3
    assert root.attrs["num_samples"] == 2
    assert root.attrs["fields"]["core"] == {
        "atomic_numbers": "atom",
        "positions": "atom",
        "forces": "atom",
        "neighbor_list": "edge",
        "neighbor_list_shifts": "edge",
        "cell": "system",
        "pbc": "system",
        "energy": "system",
    }
    assert root.attrs["fields"]["custom"] == {"fold": "system"}
    assert root["meta/atoms_ptr"][:].tolist() == [0, 3, 5]
    assert root["meta/edges_ptr"][:].tolist() == [0, 3, 5]
    assert root["meta/atoms_ptr"].dtype == np.int64
    for name, length in (("samples", 2), ("atoms", 5), ("edges", 5)):
        mask = root[f"meta/{name}_mask"]
        assert mask.dtype == bool and mask.shape == (length,) and mask[:].all()
    assert root["core/energy"].shape == (2, 1) and root["core/cell"].shape == (2, 3, 3)
    assert root["core/pbc"].dtype == bool and root["core/atomic_numbers"].dtype == np.int64


def test_without_neighbours_the_edge_pointers_are_zeros(tmp_path):
    AtomicDataZarrWriter(tmp_path / "s.zarr").write([structure(3), structure(2)])
    root = zarr.open_group(tmp_path / "s.zarr", mode="r")
    assert root["meta/edges_ptr"][:].tolist() == [0, 0, 0]
    assert AtomicDataZarrReader(tmp_path / "s.zarr").num_edges_per_sample.tolist() == [0, 0]


@pytest.mark.parametrize("budget", [0, 2**28])
def test_one_huge_chunk_is_read_row_by_row_or_kept(tmp_path, budget):
    structures = [structure(n % 9 + 1, n % 7, seed=n) for n in range(300)]
    path = tmp_path / "s.zarr"
    AtomicDataZarrWriter(path, {"core": {"chunk_size": 2**16}}).write(structures)
    reader = AtomicDataZarrReader(path, cache_bytes=budget)
    for order in ([7, 6, 5, 5], [0, 299, 120, 3], range(300)):
        assert reader.read_batch(order).to_data_list() == [structures[i] for i in order]


def test_a_field_whose_name_a_batch_needs_itself_is_reported_and_not_read(tmp_path):
    root = peer_store(tmp_path / "p.zarr")
    root.create_array("custom/device", data=np.ones((3, 1)))
    fields = root.attrs["fields"]
    root.attrs["fields"] = {**fields, "custom": {**fields["custom"], "device": "system"}}
    with pytest.warns(UserWarning, match="can not hold under their names: 'device'; they are not"):
        reader = AtomicDataZarrReader(tmp_path / "p.zarr")
    batch = reader.read_batch([0, 1])
    assert batch.device.type == "cpu" and "device" not in reader.field_names
    assert batch.fold.tolist() == [[4], [5]]
