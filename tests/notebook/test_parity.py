"""parity: its numbers are those of a loop over all atoms, and missing labels are counted."""

import math

import numpy as np
import pytest
import torch
from ase.data import chemical_symbols

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import DataLoader, InMemoryDataset, MultiDataset
from nvalchemi.models import MLPPotential
from nvalchemi.notebook.export import png
from nvalchemi.notebook.plots import parity
from nvalchemi.notebook.plots.parity_arrays import POINTS, milli
from nvalchemi.notebook.plots.parity_figure import compute_parity, draw_parity
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStrategy,
    ValidationConfig,
    default_training_fn,
)


def structures(number: int, seed: int = 0, elements: tuple[int, ...] = (1, 6, 8)) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Batch.from_data_list(
        [
            AtomicData(
                atomic_numbers=torch.tensor(elements)[
                    torch.randint(len(elements), (1 + i % 4,), generator=generator)
                ],
                positions=random(1 + i % 4, 3),
                energy=random(1, 1),
                forces=random(1 + i % 4, 3),
            )
            for i in range(number)
        ]
    )


def predictions(batch: Batch, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: getattr(batch, name)
        + 0.1 * torch.randn(getattr(batch, name).shape, generator=generator, dtype=torch.float64)
        for name in ("energy", "forces")
    }


def strategy(data=None) -> TrainingStrategy:
    torch.manual_seed(0)
    config = None if data is None else ValidationConfig(validation_data=data)
    return TrainingStrategy(
        models=MLPPotential(hidden_features=4).double(),
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.SGD),
        training_fn=default_training_fn,
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        num_epochs=1,
        validation_config=config,
    )


def by_loops(pairs: list[tuple[dict, Batch]], chosen_element: int | None = None) -> list[float]:
    """Energy MAE and RMSE per atom, forces MAE and RMSE, one atom after the other."""
    energies, forces = [], []
    for predicted, batch in pairs:
        atom = 0
        for i, structure in enumerate(batch.to_data_list()):
            numbers = structure.atomic_numbers.tolist()
            if chosen_element is None or chosen_element in numbers:
                error = float(predicted["energy"][i]) - float(structure.energy)
                if not math.isnan(float(structure.energy)):
                    energies.append(error / len(numbers))
            for z, force in zip(numbers, structure.forces.tolist()):
                if chosen_element in (None, z) and not any(map(math.isnan, force)):
                    predicted_force = predicted["forces"][atom].tolist()
                    forces += [p - f for p, f in zip(predicted_force, force)]
                atom += 1
    result = []
    for errors in (energies, forces):
        result += [sum(abs(e) for e in errors) / len(errors)]
        result += [math.sqrt(sum(e * e for e in errors) / len(errors))]
    return result


def values(row) -> list[float]:
    return [row.energy_mae, row.energy_rmse, row.forces_mae, row.forces_rmse]


def test_errors_are_those_of_a_loop_over_all_atoms():
    batches = [structures(7, 0), structures(5, 1)]
    pairs = [(predictions(batch), batch) for batch in batches]
    arrays = compute_parity(pairs)
    rows = {row.name: row for row in arrays.rows}
    assert list(rows) == ["all", "H", "C", "O"]
    np.testing.assert_allclose(values(rows["all"]), by_loops(pairs))
    assert (rows["all"].structures, rows["all"].atoms) == (12, sum(b.num_nodes for b in batches))
    for z in (1, 6, 8):
        np.testing.assert_allclose(values(rows[chemical_symbols[z]]), by_loops(pairs, z))
    assert arrays.energy_density is None and arrays.facts.exact
    assert len(arrays.forces.reference) == 3 * rows["all"].atoms


def test_missing_labels_are_left_out_and_counted():
    batch = structures(8)
    predicted = predictions(batch)
    batch.energy[2] = torch.nan
    batch.forces[4, 1] = torch.nan
    batch.forces[5] = torch.nan
    arrays = compute_parity((predicted, batch))
    assert (arrays.energy.missing, arrays.forces.missing) == (1, 2)
    assert (arrays.rows[0].structures, arrays.rows[0].atoms) == (7, batch.num_nodes - 2)
    np.testing.assert_allclose(values(arrays.rows[0]), by_loops([(predicted, batch)]))
    shown = {number.name: number.value for number in arrays.facts.numbers}
    assert (shown["energies without label"], shown["atoms without forces"]) == ("1", "2")


def test_a_label_that_no_structure_has_is_no_error():
    batch = structures(4)
    predicted = predictions(batch)
    bare = Batch.from_data_list(
        [
            AtomicData(atomic_numbers=x.atomic_numbers, positions=x.positions, energy=x.energy)
            for x in batch.to_data_list()
        ]
    )
    arrays = compute_parity((predicted, bare))
    assert math.isnan(arrays.rows[0].forces_mae) and arrays.forces.missing == batch.num_nodes
    assert arrays.rows[0].energy_mae == pytest.approx(by_loops([(predicted, batch)])[0])
    figure = draw_parity(arrays)
    assert [text.get_text() for text in figure.axes[1].texts] == ["no label with a\nprediction"]
    with pytest.raises(ValueError, match="neither an energy nor forces"):
        parity(({"forces": predicted["forces"]}, bare))


def test_predictions_that_are_not_finite_spoil_their_errors_and_are_red():
    batch = structures(6)
    predicted = predictions(batch)
    predicted["energy"][0] = torch.inf
    arrays = compute_parity((predicted, batch))
    assert arrays.energy.broken == 1 and math.isinf(arrays.rows[0].energy_mae)
    assert [number.name for number in arrays.facts.wrong] == ["predictions not finite"]
    assert png(draw_parity(arrays))


def test_data_sets_have_rows_of_their_own():
    first, second = structures(4, 0), structures(9, 1, (7,))
    pairs = {"a": (predictions(first), first), "b": [(predictions(second), second)]}
    arrays = compute_parity(pairs)
    rows = {(row.kind, row.name): row for row in arrays.rows}
    np.testing.assert_allclose(values(rows["data set", "a"]), by_loops([pairs["a"]]))
    np.testing.assert_allclose(values(rows["data set", "b"]), by_loops(pairs["b"]))
    np.testing.assert_allclose(values(rows["element", "N"]), by_loops(pairs["b"]))
    assert arrays.names == ("a", "b")


def test_a_strategy_predicts_for_all_of_its_validation_data():
    parts = [structures(5, 0), structures(6, 1)]
    data = MultiDataset(*map(InMemoryDataset, parts))
    trained = strategy(DataLoader(data, batch_size=3))
    arrays = compute_parity(trained, names=["first", "second"])
    model = trained.models["main"]
    pairs = [({k: v.detach() for k, v in model(part).items()}, part) for part in parts]
    rows = {row.name: row for row in arrays.rows}
    np.testing.assert_allclose(values(rows["all"]), by_loops(pairs))
    np.testing.assert_allclose(values(rows["first"]), by_loops(pairs[:1]))
    np.testing.assert_allclose(values(rows["second"]), by_loops(pairs[1:]))
    assert model.training and all(p.grad is None for p in model.parameters())


def test_a_strategy_predicts_for_other_data_where_labels_are_missing():
    batch = structures(5)
    batch.energy[0] = torch.nan
    arrays = compute_parity(strategy(), batch)
    assert arrays.energy.missing == 1
    assert compute_parity(strategy(), [batch]).rows == arrays.rows


def test_after_a_training_errors_are_those_of_the_validation():
    data = [structures(6, 3), structures(5, 4)]
    trained = strategy(data)
    trained.run([structures(4)])
    forces = compute_parity(trained).rows[0].forces_rmse
    counts = [part.num_nodes for part in data]
    pairs = [(trained.models["main"](part), part) for part in data]
    squares = sum(
        float((p["forces"].detach() - part.forces).square().mean()) * n
        for (p, part), n in zip(pairs, counts)
    )
    assert forces == pytest.approx(math.sqrt(squares / sum(counts)))


def test_many_pairs_are_drawn_as_a_density_that_counts_all_of_them():
    batch = structures(1200)
    arrays = compute_parity((predictions(batch), batch))
    density = arrays.forces_density
    assert len(arrays.forces.reference) > POINTS and arrays.energy_density is None
    assert density.counts.sum() == len(arrays.forces.reference)
    # cell by cell, by numpy's own histogram
    edges = np.linspace(density.low, density.high, len(density.counts) + 1)
    counts = np.histogram2d(arrays.forces.predicted, arrays.forces.reference, [edges, edges])[0]
    assert np.abs(counts - density.counts).sum() <= 4  # values on an edge, rounded otherwise
    assert len(draw_parity(arrays).axes[1].images) == 1


def test_the_picture_has_units_and_the_same_bytes():
    batch = structures(10)
    arrays = compute_parity((predictions(batch), batch))
    figure = draw_parity(arrays)
    assert figure.axes[0].get_xlabel() == "reference, eV/atom"
    assert figure.axes[1].get_ylabel() == "predicted, eV/Å"
    assert {"meV/atom", "meV/Å"} <= {text.get_text() for text in figure.axes[2].texts}
    before = png(figure)
    assert png(draw_parity(arrays, figure)) == before == png(draw_parity(arrays))
    assert "energy MAE" in figure.get_label()


@pytest.mark.parametrize(
    "value, said",
    [
        (0.0, "0"),
        (1.0996, "1100"),
        (0.5752, "575"),
        (0.0123, "12.3"),
        (0.009999, "10.0"),
        (0.0012345, "1.23"),
        (1.2345e-5, "0.012"),
        (1.2e-9, "1.2e-6"),
        (1.2e9, "1.2e12"),
        (math.nan, "-"),
        (math.inf, "inf"),
    ],
)
def test_errors_are_fixed_point_numbers_of_at_most_six_letters(value, said):
    assert milli(value) == said and len(said) <= 6


def test_the_words_of_the_table_do_not_touch():
    batch = structures(20)
    predicted = {name: values * 200 for name, values in predictions(batch).items()}
    other = structures(5, 1)
    pairs = {"molecules of a long name": (predicted, batch), "b": (predictions(other), other)}
    arrays = compute_parity(pairs)
    assert arrays.facts.look_for.startswith("Look for: ")
    figure = draw_parity(arrays)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[2].texts]
    touching = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not touching


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda b: parity(3), TypeError, "parity takes a TrainingStrategy, a pair"),
        (lambda b: parity({"energy": b.energy}), TypeError, "got Tensor"),
        (lambda b: parity([]), ValueError, "at least one batch"),
        (lambda b: parity((predictions(b), b), b), ValueError, "bring their own"),
        (lambda b: parity((predictions(structures(3)), b)), ValueError, "of the batch beside"),
        (lambda b: parity(strategy()), ValueError, "has no validation_config"),
        (lambda b: parity(strategy(), [b], names=[]), ValueError, "0 names for 1 data sets"),
    ],
)
def test_mistakes_are_told(call, error, match):
    with pytest.raises(error, match=match):
        call(structures(5))


def test_a_sampler_of_one_rank_is_refused():
    data = InMemoryDataset(structures(6))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    with pytest.raises(ValueError, match="for one of 2 ranks"):
        parity(strategy(), DataLoader(data, batch_size=2, sampler=sampler))
