"""DatasetExplorer and its pictures, on labelled structures with planted faults."""

import numpy as np
import pytest
import torch

from nvalchemi.data import Batch, InMemoryDataset, MultiDataset
from nvalchemi.data.convert import audit_labels, from_ase, import_atoms
from nvalchemi.data.datapipes import AtomicDataZarrReader, Dataset
from nvalchemi.data.demo_sets import alloys
from nvalchemi.notebook import DatasetExplorer
from nvalchemi.notebook.export import png
from nvalchemi.notebook.plots.dataset import compute_dataset, plot_dataset, refine_dataset
from nvalchemi.notebook.plots.labels import plot_labels
from nvalchemi.notebook.plots.outliers import fitted_residual, robust_z


@pytest.fixture(scope="module")
def frames():
    return alloys(80, seed=2)


def faulty(frames):
    """Structure 17 has a wrong energy, 5 a wild force, 30 and 31 lack their forces."""
    structures = [from_ase(atoms, label_keys=KEYS) for atoms in frames]
    structures[17].energy = structures[17].energy + 4.0 * len(frames[17])
    structures[5].forces = structures[5].forces.clone()
    structures[5].forces[0, 1] = 4e4
    for i in (30, 31):
        structures[i].forces = torch.full_like(structures[i].forces, torch.nan)
    return structures


KEYS = {"energy": "energy", "forces": "forces"}


def numbers(arrays):
    return {number.name: number for number in arrays.facts.numbers}


def test_counts_ranges_and_missing_labels_by_hand(frames):
    structures = faulty(frames)
    arrays = compute_dataset(InMemoryDataset(Batch.from_data_list(structures)))
    assert arrays.atoms.tolist() == [len(atoms) for atoms in frames] == arrays.sizes.tolist()
    for symbol, count in arrays.elements.items():
        assert count == sum(symbol in atoms.get_chemical_symbols() for atoms in frames)
    energies = [float(s.energy) / len(atoms) for s, atoms in zip(structures, frames)]
    assert arrays.energy == pytest.approx(energies, rel=1e-5)
    force = [float(s.forces.norm(dim=1).max()) for s in structures]
    assert arrays.force == pytest.approx(force, rel=1e-5, nan_ok=True)
    assert arrays.missing["forces"].tolist() == [2] and arrays.missing["energy"].tolist() == [0]
    assert numbers(arrays)["no forces"].wrong and not numbers(arrays)["no energy"].wrong
    assert "stress" not in arrays.missing  # nobody asked for it
    assert arrays.facts.exact and "all 80 structures" in arrays.facts.truth


def test_outliers_are_named(frames):
    arrays = compute_dataset(InMemoryDataset(Batch.from_data_list(faulty(frames))))
    named = {(outlier.index, outlier.what) for outlier in arrays.outliers}
    assert {(17, "energy"), (5, "forces")} <= named
    far = next(outlier for outlier in arrays.outliers if outlier.index == 17)
    assert far.formula == frames[17].get_chemical_formula() and far.z > 5
    assert far.value == pytest.approx(4.0, abs=0.3)
    explorer = DatasetExplorer(InMemoryDataset(Batch.from_data_list(faulty(frames))))
    explorer.controls["sample"].value = 17
    shown = explorer.html()
    assert f"<td>17</td><td>0</td><td>{far.formula}</td><td>energy</td>" in shown
    assert f"Structure 17: {far.formula}, {len(frames[17])} atoms, energy" in shown
    assert "data:image/png;base64," in shown and "no forces" in repr(explorer)
    explorer.controls["sample"].value = 30
    assert "no forces." in explorer.html()


def test_an_even_data_set_has_no_outliers():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 500)
    values = rng.normal(size=1000) + 100 * groups
    z = robust_z(values, groups)
    assert np.abs(z).max() < 5 and z.std() == pytest.approx(1, abs=0.1)
    assert (robust_z(np.ones(9), np.zeros(9, dtype=int)) == 0).all()
    assert np.isnan(robust_z(np.array([np.nan, 1.0]), np.zeros(2, dtype=int))[0])
    one_off = np.ones(9)
    one_off[3] = 2.0  # half of them and more are the same
    assert np.argmax(robust_z(one_off, np.zeros(9, dtype=int))) == 3


def test_atomic_energies_are_fitted_without_the_outliers():
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, (200, 3)).astype(np.uint16)
    atoms = counts.sum(axis=1)
    energy = counts @ np.array([-1.0, -30.0, 5.0]) / atoms + rng.normal(0, 1e-3, 200)
    energy[7] += 50.0
    energy[9] = np.nan
    residual = fitted_residual(energy, counts, np.zeros(200, dtype=np.int64))
    assert residual[7] == pytest.approx(50.0, abs=0.01) and np.isnan(residual[9])
    assert np.abs(np.delete(residual, [7, 9])).max() < 0.01
    few = fitted_residual(energy[:4], counts[:4], np.zeros(4, dtype=np.int64))
    assert few == pytest.approx(energy[:4] - np.median(energy[:4]))


def test_a_large_set_is_sampled_first_and_then_read_whole(frames):
    dataset = InMemoryDataset(Batch.from_data_list([from_ase(a) for a in frames]))
    part = compute_dataset(dataset, structures=20)
    assert len(part.indices) == 20 and not part.facts.exact
    assert "sample of 25.0 %: 20 of 80 structures" in part.facts.truth
    *_, whole = refine_dataset(dataset)
    assert whole.facts.exact and sorted(whole.indices.tolist()) == list(range(80))
    assert numbers(whole) == numbers(compute_dataset(dataset))


def test_several_data_sets_and_a_store(frames, tmp_path):
    import_atoms(frames[:30], tmp_path / "a.zarr", label_keys=KEYS)
    stored = Dataset(AtomicDataZarrReader(tmp_path / "a.zarr"), device="cpu")
    memory = InMemoryDataset(Batch.from_data_list(faulty(frames)))
    explorer = DatasetExplorer(MultiDataset(stored, memory, output_strict=False))
    (pane,) = explorer.panes
    assert pane.arrays.lengths == [30, 80] and pane.arrays.read.tolist() == [30, 80]
    assert pane.arrays.missing["forces"].tolist() == [0, 2]
    explorer.controls["dataset"].value = 0
    assert len(pane.arrays.indices) == 30 and pane.arrays.missing["forces"].sum() == 0
    explorer.controls["dataset"].value = 1
    assert pane.arrays.indices.min() == 30
    assert {o.index for o in pane.arrays.outliers} >= {30 + 17, 30 + 5}


def test_pictures_are_deterministic(frames):
    dataset = InMemoryDataset(Batch.from_data_list(faulty(frames)))
    assert png(plot_dataset(dataset)) == png(plot_dataset(dataset, exact=True, figure=None))
    audit = audit_labels(frames, {**KEYS, "dipole": "dipole"})
    assert png(plot_labels(audit)) == png(plot_labels(audit))


def test_the_audit_of_an_import_is_a_picture(frames):
    audit = audit_labels(frames, {"energy": "energy", "forces": "force"})
    explorer = DatasetExplorer(audit)
    (pane,) = explorer.panes
    assert pane.arrays.present.tolist() == [80, 0]
    assert (
        numbers(pane.arrays)["no forces"].value == "80" and numbers(pane.arrays)["no forces"].wrong
    )
    assert audit.findings == pane.arrays.findings and "forces" in explorer.html()
    dataset = InMemoryDataset(Batch.from_data_list(faulty(frames)))
    both = DatasetExplorer(dataset, audit=audit)
    assert both.tabs.titles == ("Data", "Label audit")
    assert both.show("Label audit").panes[0].arrays.structures == 80


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (3, "a data set must have a length and structures by index to be shown, got int"),
        ([], "must hold at least one structure to be shown, got none"),
        ([1, 2], "a data set must give AtomicData to be shown, got int"),
        (audit_labels([]), "a label audit needs structures to be drawn"),
    ],
)
def test_what_is_no_data_set_is_a_sentence(bad, sentence):
    explorer = DatasetExplorer(bad)
    assert sentence in explorer.html() and sentence in repr(explorer)
    assert 'role="alert"' in explorer.html()
