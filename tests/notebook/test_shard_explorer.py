"""ShardExplorer, its controls moved in process: what it shows against the plan, asked by hand."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from ase.build import molecule
from plot_cases import NoSetEpoch, RankBlind, Uneven, drawn, samples

from nvalchemi.data import Batch, InMemoryDataset
from nvalchemi.data.convert import from_ase
from nvalchemi.data.datapipes import DataLoader, EpochSampler, MultiDatasetBatchSampler
from nvalchemi.notebook import ShardExplorer
from nvalchemi.notebook.plots import plot_assignment
from nvalchemi.sharding import ShardPlan
from nvalchemi.training import DDPHook

PNG = re.compile(r'<img alt="([^"]+)"[^>]* src="data:image/png;base64,([A-Za-z0-9+/=]+)">')
PAGES = ("Assignment", "Who saw what", "Load", "Resume")


def plan_of(**options):
    sizes = (np.arange(101) % 9 + 1, np.arange(101) % 7)
    return ShardPlan([60, 41], **{"world_size": 4, "batch_size": 4, "sizes": sizes} | options)


def move(explorer, **values):
    for name, value in values.items():
        explorer.controls[name].value = value
    return explorer


def audit(explorer):
    return {number.name: number for number in explorer.audit.numbers}


def test_controls_change_the_plan_and_what_is_counted():
    explorer = ShardExplorer(plan_of())
    move(explorer, epoch=3, world_size=3, batch_size=5, seed=7, drop_last=True)
    plan = explorer.plan
    assert plan.hash == plan_of(world_size=3, batch_size=5, seed=7, drop_last=True).hash
    (pane,) = explorer.panes
    cells = plan.window(None, None, 3)
    assert np.array_equal(pane.arrays.cells, cells)
    taken = Counter(samples(plan, 3))
    assert audit(explorer)["dropped"].value == str(101 - len(taken))
    assert audit(explorer)["never seen"].value == str(101 - len(taken)) != "0"
    assert (
        audit(explorer)["steps"].value == str(len(cells)) and audit(explorer)["ranks"].value == "3"
    )
    shown = explorer.html()
    assert f"epoch 3, plan {plan.hash}" in shown and len(PNG.findall(shown)) == 1
    assert move(explorer, shuffle=False).controls["seed"].disabled
    assert "seed: shuffle is off" in explorer._settings.reasons.value
    assert explorer.panes[0].arrays.cells[0, 0].tolist() == explorer.plan.batch(0, 0, 3).tolist()


def test_the_same_plan_gives_the_same_picture_as_the_plain_function():
    from nvalchemi.notebook.export import png

    (pane,) = ShardExplorer(plan_of()).panes
    assert pane.picture == png(plot_assignment(plan_of()))


def test_only_the_visible_tab_is_computed_and_each_is_right():
    explorer = ShardExplorer(plan_of(epochs=2))
    hidden = [p for page in explorer._pages.values() for p in page if hasattr(p, "arrays")][1:]
    assert len(hidden) == 4 and all(pane.arrays is None and not pane.picture for pane in hidden)
    plan = explorer.plan

    overlap, order = explorer.show("Who saw what").panes
    seen = [set(samples(plan, 0, [r])) for r in range(4)]
    assert overlap.arrays.shared[0, 3] == len(seen[0] & seen[3])
    assert order.arrays.epochs == (0, 1)

    (load,) = explorer.show("Load").panes
    atoms = np.arange(101) % 9 + 1
    costs = {(step, rank): atoms[batch].sum() for rank, step, batch in drawn(plan)}
    assert load.arrays.largest.cost == max(costs.values()) and load.arrays.unit == "atoms"
    move(explorer, by="edges")
    edges = max(int((np.array(batch) % 101 % 7).sum()) for *_, batch in drawn(plan))
    assert load.arrays.unit == "edges" and load.arrays.largest.cost == edges

    (resume,) = explorer.show("Resume").panes
    move(explorer, ranks_after=8, stop=3)
    assert explorer.controls["batch_size_after"].value == 2  # keeps the global batch
    numbers = {number.name: number.value for number in resume.facts.numbers}
    before = {s for *_, batch in drawn(plan, steps=range(3)) for s in batch}
    assert numbers["seen before"] == str(len(before)) and numbers["again"] == "0"
    move(explorer, batch_size_after=3)  # 3 steps of 16 are 2 steps of 24
    assert resume.error is None and "again" in numbers


def test_a_zoom_ends_in_real_samples_and_back():
    explorer = ShardExplorer(ShardPlan(20_000, sampler=EpochSampler, world_size=8, batch_size=4))
    (pane,) = explorer.panes
    assert pane.arrays.cells is None and pane.facts.exact
    move(explorer, ranks=(2, 5), steps=(100, 101), samples=(5000, 19_999))
    plan, arrays = explorer.plan, pane.arrays
    assert np.array_equal(arrays.cells, plan.window(range(100, 102), range(2, 6)))
    assert arrays.samples == (5000, 20_000)
    move(explorer, world_size=4)  # the zoom stays inside what there is
    assert explorer.controls["ranks"].value == (2, 3) and pane.error is None
    explorer._whole.click()
    assert explorer.controls["ranks"].value == (0, 3) and pane.arrays.cells is None
    assert len(pane.arrays.ranks) == 4
    move(explorer, world_size=6)  # and what was whole stays whole
    assert explorer.controls["ranks"].value == (0, 5)


def test_a_sample_of_a_small_data_set_is_named():
    names = ["CH4", "H2O", "C2H6"] * 5
    structures = [from_ase(molecule(name), label_keys={"energy": None}) for name in ()]
    structures = [labelled(name) for name in names]
    dataset = InMemoryDataset(Batch.from_data_list(structures))
    plan = ShardPlan(dataset, world_size=2, batch_size=3)
    explorer = move(ShardExplorer(plan), sample=4)
    where = [(r, s) for r, s, batch in drawn(plan) if 4 in batch]
    said = explorer._named.value
    assert "Sample 4: H2O, 3 atoms, of the data set" in said
    assert all(f"rank {rank} at step {step}" in said for rank, step in where) and where
    lengths = move(ShardExplorer(plan_of()), sample=70)
    assert "Sample 70: 8 atoms, formula not known, number 10 of data set 1" in lengths._named.value
    dropped = ShardPlan(9, sampler=EpochSampler, world_size=2, batch_size=4, drop_last=True)
    lost = (set(range(9)) - set(samples(dropped))).pop()
    assert "no rank takes it" in move(ShardExplorer(dropped), sample=lost)._named.value


def labelled(name):
    atoms = molecule(name)
    from ase.calculators.singlepoint import SinglePointCalculator

    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.zeros((len(atoms), 3)))
    return from_ase(atoms)


@pytest.mark.parametrize(
    ("sampler", "page", "check", "red"),
    [
        (RankBlind, 1, "identical ranks", "pairs with the same samples"),
        (NoSetEpoch, 1, "equal epochs", "at the same place in epoch 1"),
        (Uneven, 0, "steps", "steps"),
    ],
)
def test_planted_faults_are_in_the_strip_and_in_the_picture(sampler, page, check, red):
    plan = ShardPlan(90, sampler=sampler, world_size=4, batch_size=1)
    explorer = ShardExplorer(plan).show(PAGES[page])
    checks = [finding.data["check"] for finding in explorer.audit.findings]
    assert any(check in name for name in checks), checks
    finding = next(f for f in explorer.audit.findings if check in f.data["check"])
    wrong = [n.name for pane in explorer.panes for n in pane.facts.wrong]
    assert red in wrong + [n.name for n in explorer.audit.numbers if n.wrong], wrong
    shown = explorer.html()
    assert finding.remedy.split(",")[0] in shown.replace("&#x27;", "'") and "⚠" in shown
    assert finding.sentence in repr(explorer)


def test_settings_that_the_sampler_does_not_know_are_disabled_with_the_reason():
    explorer = ShardExplorer(ShardPlan(50, sampler=EpochSampler, world_size=2, batch_size=4))
    assert explorer.controls["epoch_policy"].disabled
    assert "policy: EpochSampler has no argument epoch_policy" in explorer._settings.reasons.value
    assert not explorer.controls["seed"].disabled
    weighted = ShardExplorer(
        plan_of(sampler=MultiDatasetBatchSampler, sampler_kwargs={"weights": [1, 1]})
    )
    before = weighted.plan.num_steps()
    move(weighted, epoch_policy="max_size")
    assert weighted.plan.num_steps() > before and weighted.panes[0].error is None
    built = EpochSampler(range(50), num_replicas=2)
    fixed = ShardExplorer(ShardPlan(50, sampler=built, world_size=2))
    names = ("world_size", "batch_size", "seed", "shuffle", "drop_last", "epoch_policy")
    assert all(fixed.controls[name].disabled for name in names)
    assert "built before the plan" in fixed._settings.reasons.value
    assert move(fixed, epoch=2).panes[0].error is None


def test_settings_that_do_not_go_together_are_a_sentence():
    explorer = ShardExplorer(ShardPlan([64, 4], world_size=2, batch_size=8, drop_last=True))
    move(explorer, world_size=64)
    (pane,) = explorer.panes
    assert (
        pane.arrays is None and "every rank must have a step: 8 batches for 64 ranks" in pane.text
    )
    assert 'role="alert"' in explorer.html() and "Traceback" not in explorer.html()
    move(explorer, world_size=2)
    assert pane.error is None and explorer.plan.world_size == 2


class WithHook:
    """What a plan asks of a strategy."""

    num_epochs, num_steps, epoch_step_modifier = 2, None, 1.0
    hooks = [DDPHook(sampler_kwargs={"seed": 3})]

    def run(self, loader):
        raise AssertionError("nothing is trained")


def test_loaders_and_strategies_are_planned():
    loader = torch.utils.data.DataLoader(range(50), batch_size=4, shuffle=True)
    explorer = ShardExplorer(loader, world_size=4)
    assert explorer.plan.hash == ShardPlan.from_loader(loader, world_size=4).hash
    move(explorer, world_size=3, batch_size=2, seed=5)
    expected = ShardPlan(50, world_size=3, batch_size=2, seed=5)
    assert np.array_equal(explorer.plan.window(None), expected.window(None))
    assert loader.batch_size == 4
    strategy = ShardExplorer(WithHook(), loader, world_size=4)
    assert strategy.plan.epochs == 2 and strategy.controls["seed"].value == 3
    alone = ShardExplorer(WithHook())
    assert alone.plan is None and "give the loader as well" in alone.html()
    dataset = InMemoryDataset(Batch.from_data_list([labelled("CH4")] * 9))
    ours = ShardExplorer(DataLoader(dataset, batch_size=2), world_size=2)
    assert [p.error for p in ours.panes] == [None] and ours.plan.batch_size == 2


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (3, "got int; of a data set make a plan first"),
        (None, "got NoneType"),
        ([], "got list"),
        (
            torch.utils.data.DataLoader(range(9), batch_sampler=[[1, 2], [3]]),
            "DDPHook cannot replace a non-distributed batch_sampler",
        ),
    ],
)
def test_what_can_not_be_planned_is_a_sentence_in_the_widget(bad, sentence):
    explorer = (
        ShardExplorer(bad) if not hasattr(bad, "dataset") else ShardExplorer(bad, world_size=2)
    )
    bundle = explorer._repr_mimebundle_()
    assert (
        sentence in bundle["text/html"].replace("&#x27;", "'") and sentence in bundle["text/plain"]
    )
    assert 'role="alert"' in bundle["text/html"] and "Traceback" not in bundle["text/html"]
    assert explorer.widget.model_id in str(bundle["application/vnd.jupyter.widget-view+json"])
    assert explorer.plan is None and explorer.panes == []


def test_large_plans_are_first_a_sample_and_exact_when_that_is_asked_for():
    explorer = ShardExplorer(ShardPlan(2**19, sampler=EpochSampler, world_size=64, batch_size=16))
    (pane,) = explorer.panes
    assert not pane.facts.exact and "sample of" in pane.facts.truth
    assert not explorer._exactly.disabled
    explorer.refine()
    assert pane.facts.exact and explorer._exactly.disabled
    assert pane.arrays.by_rank.sum() == 2**19
    move(explorer, epoch=1)
    assert not pane.facts.exact  # the next epoch is not counted unasked


def test_an_order_that_takes_long_to_draw_says_so_and_can_be_asked_for():
    plan = ShardPlan(2**22 + 8, world_size=8, batch_size=64)  # torch draws it whole
    explorer = ShardExplorer(plan)
    (pane,) = explorer.panes
    assert pane.arrays is None and "EpochSampler" in pane.text and not explorer._exactly.disabled
    explorer.refine()
    assert pane.facts.exact and pane.arrays.by_rank.sum() == 2**22 + 8


def test_pictures_carry_alt_text_and_little_is_sent():
    explorer = ShardExplorer(ShardPlan(10**5, sampler=EpochSampler, world_size=8, batch_size=64))
    for page in PAGES[:2]:
        explorer.show(page)
        for pane in explorer.panes:
            ((alt, data),) = PNG.findall(pane.widget.value)
            assert pane.facts.question in alt and explorer.plan.hash in alt
            assert len(pane.widget.value) < 300_000 and data.startswith("iVBOR")
    controls = explorer.controls.items()
    assert all(control.description for _, control in controls), "every control has a label"


def test_a_page_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="page must be one of Assignment, Who saw what"):
        ShardExplorer(plan_of()).show("Audit")
