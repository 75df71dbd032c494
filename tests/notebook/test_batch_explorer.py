"""BatchExplorer: mixture, coverage and one batch, against the plan asked by hand."""

from collections import Counter

import numpy as np
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from plot_cases import Starving, drawn, samples

from nvalchemi.data import Batch, InMemoryDataset, MultiDataset
from nvalchemi.data.convert import from_ase
from nvalchemi.notebook import BatchExplorer
from nvalchemi.sharding import ShardPlan


def dataset_of(*names):
    structures = []
    for name in names:
        atoms = molecule(name)
        atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.zeros((len(atoms), 3)))
        structures.append(from_ase(atoms))
    return InMemoryDataset(Batch.from_data_list(structures))


def test_composition_by_rank_and_together():
    plan = ShardPlan([70, 30, 3], world_size=3, batch_size=4)
    explorer = BatchExplorer(plan)
    (pane,) = explorer.panes
    for chosen in (None, 2):
        if chosen is not None:
            explorer.controls["of"].value = "one rank"
            explorer.controls["rank"].value = chosen
        explorer.controls["epoch"].value = 1
        ranks = range(3) if chosen is None else [chosen]
        got = plan.samples.count(np.array(samples(plan, 1, ranks)))
        assert pane.arrays.counts.sum(axis=0).tolist() == got.tolist()
        steps = {}
        for _, step, batch in drawn(plan, 1, ranks):
            for owner in plan.samples.dataset_of(np.array(batch)).tolist():
                steps[owner] = min(step, steps.get(owner, step))
        first = [steps.get(j, -1) for j in range(3)]
        assert pane.arrays.first.tolist() == first


def test_a_starved_data_set_is_seen():
    plan = ShardPlan(
        [900, 100],
        sampler=Starving,
        sampler_kwargs={"weights": [1, 1]},
        world_size=2,
        batch_size=8,
    )
    explorer = BatchExplorer(plan)
    assert explorer.audit.findings and "data set" in repr(explorer)


def test_coverage_over_epochs():
    plan = ShardPlan(50, world_size=3, batch_size=4, epochs=2)
    explorer = BatchExplorer(plan).show("Coverage")
    (pane,) = explorer.panes
    for epochs in (2, 3):
        explorer.controls["epochs"].value = epochs
        times = Counter(s for epoch in range(epochs) for s in samples(plan, epoch))
        histogram = Counter(times[s] for s in range(50))
        shown = dict(enumerate(pane.arrays.histogram[0].tolist()))
        assert {k: n for k, n in shown.items() if n} == histogram
        assert pane.arrays.epochs == list(range(epochs))


def test_one_batch_is_opened_as_a_table_and_drawn():
    both = MultiDataset(dataset_of("CH4", "H2O", "NH3", "C2H6"), dataset_of("CO2", "H2", "N2"))
    explorer = BatchExplorer(ShardPlan(both, world_size=2, batch_size=2)).show("One batch")
    (pane,) = explorer.panes
    for rank, step in ((0, 0), (1, 1)):
        explorer.controls["rank"].value, explorer.controls["step"].value = rank, step
        batch = explorer.plan.batch(rank, step).tolist()
        names = ["CH4", "H2O", "NH3", "C2H6", "CO2", "H2", "N2"]
        formulas = [molecule(names[i]).get_chemical_formula() for i in batch]
        assert pane.arrays.samples.tolist() == batch and pane.arrays.formulas == formulas
        table = explorer._table.value
        assert 'aria-label="structures of the batch"' in table
        assert all(f"<td>{formula}</td>" in table for formula in formulas)
        assert len(pane.arrays.structures) == len(batch) and pane.picture
        assert table in explorer.html()
    explorer.controls["step"].value = 99  # stays inside the epoch
    assert explorer.controls["step"].value == explorer.plan.num_steps() - 1 and pane.error is None


def test_what_is_no_plan_is_a_sentence():
    explorer = BatchExplorer("plan")
    assert "got str" in explorer.html() and "got str" in repr(explorer)
