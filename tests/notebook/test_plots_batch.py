"""One batch opened."""

import numpy as np
import pytest
from plot_cases import numbers, wrong

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import InMemoryDataset
from nvalchemi.data.demo_sets import alloys
from nvalchemi.notebook.plots import plot_batch
from nvalchemi.notebook.plots.batch import compute_batch
from nvalchemi.sharding import ShardPlan


def test_sizes_elements_and_structures_of_a_batch():
    frames = alloys(40)
    dataset = InMemoryDataset(
        Batch.from_data_list([AtomicData.from_atoms(atoms) for atoms in frames])
    )
    plan = ShardPlan(dataset, world_size=2, batch_size=8)
    arrays = compute_batch(plan, 1, 1)
    own = [frames[i] for i in plan.batch(1, 1).tolist()]
    assert arrays.samples.tolist() == plan.batch(1, 1).tolist()
    assert arrays.atoms.tolist() == [len(atoms) for atoms in own]
    assert arrays.formulas == [atoms.get_chemical_formula() for atoms in own]
    symbols = [symbol for atoms in own for symbol in atoms.get_chemical_symbols()]
    assert arrays.elements == {name: symbols.count(name) for name in set(symbols)}
    assert numbers(arrays)["atoms"].value == f"{len(symbols):,}" and wrong(arrays) == set()
    sizes = [len(atoms) for atoms in arrays.structures]
    assert sizes[0] == max(arrays.atoms) and sizes[-1] == min(arrays.atoms) and len(sizes) == 4
    np.testing.assert_allclose(
        arrays.structures[0].positions, own[int(arrays.drawn[0])].positions, atol=1e-5
    )
    figure = plot_batch(plan, 1, 1)
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["atoms of a structure", "element"]
    assert len(figure.axes) == 6 and all(axes.patches for axes in figure.axes[2:])


def test_a_plan_of_lengths_says_what_is_missing():
    figure = plot_batch(ShardPlan(40, world_size=2, batch_size=8))
    words = [text.get_text().replace("\n", " ") for axes in figure.axes for text in axes.texts]
    assert any("give ShardPlan(sizes=atoms)" in text for text in words)
    assert any("give dataset=" in text for text in words)


def test_batches_that_are_not_there():
    plan = ShardPlan(40, world_size=2, batch_size=8)
    with pytest.raises(ValueError, match="ranks must be in"):
        plot_batch(plan, 2)
    with pytest.raises(ValueError, match="steps must be in"):
        plot_batch(plan, 0, 3)
    with pytest.raises(ValueError, match="step must be"):
        plot_batch(plan, 0, -1)
