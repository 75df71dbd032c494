"""plot_run: what is drawn is what the folder says, and nothing that matters is thinned away."""

import json
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvalchemi.notebook.export import bundle, png
from nvalchemi.notebook.plots.run import compute_run, draw_run, plot_run
from nvalchemi.notebook.plots.run_arrays import CELLS, Curve
from nvalchemi.notebook.run import Run


def write_run(
    folder: Path, losses, *, ranks: int = 2, state: str = "done", validation=(), **status
) -> Path:
    """A run folder with these losses, one a second, and ranks of which each is 0.1 s later."""
    folder.mkdir()
    mark = {"session": 0, "step": 0, "ranks": ranks, "time": 0.0}
    steps = range(1, len(losses) + 1)
    rows = [
        {"step": s, "loss": loss, "parts": {"A": loss, "B": 1.0}, "lr": 0.1, "time": float(s)}
        for s, loss in zip(steps, losses)
    ]
    rows += [{"validation": "v", "step": s, "loss": loss} for s, loss in validation]
    lines = "".join(f"{json.dumps(row)}\n" for row in [mark, *rows])
    (folder / "metrics.jsonl").write_text(lines)
    for rank in range(ranks):
        work = [
            {
                "step": s,
                "steps": 1,
                "time": s + 0.1 * rank,
                "seconds": 0.5,
                "wait": 0.1,
                "structures": 4,
                "atoms": 40 + rank,
                "rss": 100.0 + rank,
            }
            for s in steps
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in [mark, *work])
        (folder / f"rank{rank}.jsonl").write_text(lines)
    values = {"state": state, "step": len(losses), "steps": len(losses), "session": 0}
    place = {"host": socket.gethostname(), "pid": os.getpid(), "updated": 60.0, "started": 0.0}
    (folder / "status.json").write_text(json.dumps(values | place | status))
    return folder


def numbers(arrays) -> dict[str, str]:
    return {number.name: str(number) for number in arrays.facts.numbers}


def test_arrays_are_those_of_the_files(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0, 1.0], validation=[(2, 5.0), (3, 4.0)])
    arrays = compute_run(folder)
    (run,) = arrays.runs
    np.testing.assert_array_equal(run.losses["loss"].y, [3, 2, 1])
    np.testing.assert_array_equal(run.validations["loss"].x, [2, 3])
    assert list(run.throughput.curves) == ["rank 0", "rank 1"]
    np.testing.assert_allclose(run.throughput.curves["rank 1"].y, 8.0)
    np.testing.assert_allclose(run.load.curves["rank 1"].y, 41.0)
    np.testing.assert_allclose(run.memory.curves["rank 1"].y, 101.0)
    np.testing.assert_allclose(run.lag.seconds, [0, 0.1], atol=1e-9)
    assert numbers(arrays) == {
        "state": "state: done",
        "steps": "steps: 3 of 3",
        "time": "time: 1 min 0 s",
        "loss, last": "loss, last: 1",
        "validation, best": "validation, best: 4",
        "structures/s, all ranks": "structures/s, all ranks: 16",
        "lag, last": "lag, last: 0.1 s, rank 1",
    }
    assert arrays.facts.exact


@given(
    hnp.arrays(float, st.integers(1, 5 * CELLS), elements=st.floats(-1e6, 1e6) | st.just(np.nan))
)
def test_thinned_curves_keep_ends_and_extremes(y):
    x = np.arange(len(y), dtype=float)
    curve = Curve.of(x, y)
    good = np.isfinite(y)
    assert len(curve.x) <= 2 * CELLS + 2
    assert curve.thinned == (good.sum() > 2 * CELLS)
    np.testing.assert_array_equal(curve.y, y[curve.x.astype(int)])
    np.testing.assert_array_equal(curve.broken, x[~good][:CELLS])
    if good.any():
        assert (curve.y.min(), curve.y.max()) == (y[good].min(), y[good].max())
        assert (curve.x[0], curve.x[-1]) == (x[good][0], x[good][-1])


def test_a_long_curve_says_that_it_is_thinned(tmp_path):
    losses = np.ones(3000)
    losses[1234] = 100.0
    arrays = compute_run(write_run(tmp_path / "run", losses.tolist(), ranks=1))
    assert not arrays.facts.exact and arrays.facts.truth.startswith("extremes: ")
    assert 100.0 in arrays.runs[0].losses["loss"].y


def test_losses_that_are_not_finite_are_marked_and_told(tmp_path):
    arrays = compute_run(write_run(tmp_path / "run", [1.0, "NaN", "NaN"]))
    np.testing.assert_array_equal(arrays.runs[0].losses["loss"].broken, [2, 3])
    assert [number.name for number in arrays.facts.wrong] == ["loss, last"]
    figure = draw_run(arrays)
    crosses = figure.axes[0].collections[-1].get_offsets()
    np.testing.assert_array_equal(crosses[:, 0], [2, 3])


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_run_that_ended_badly_is_told_in_red(tmp_path, state):
    folder = write_run(tmp_path / "run", [1.0], state=state, error="ValueError: no")
    arrays = compute_run(folder)
    assert "state" in [number.name for number in arrays.facts.wrong]
    assert "ValueError: no" in arrays.facts.plan


def test_many_ranks_are_drawn_as_median_and_range(tmp_path):
    run = compute_run(write_run(tmp_path / "run", [1.0] * 4, ranks=9)).runs[0]
    assert list(run.load.curves) == ["lowest", "median", "highest"]
    heights = [curve.y[0] for curve in run.load.curves.values()]
    assert heights == [40, 44, 48]


def test_several_runs_have_dashes_and_markers_of_their_own(tmp_path):
    folders = [write_run(tmp_path / name, [2.0, 1.0 + i]) for i, name in enumerate("abc")]
    figure = plot_run(folders)
    lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    named = {line.get_label(): line for line in lines}
    assert sorted(name for name in named if name) == ["a", "b", "c"]
    looks = {(named[n].get_linestyle(), named[n].get_marker(), named[n].get_color()) for n in "abc"}
    assert len(looks) == len({look[0] for look in looks}) == len({look[1] for look in looks}) == 3
    assert numbers(compute_run(folders))["c: loss, last"] == "c: loss, last: 3"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "run", [1.0])
    arrays = compute_run([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [run.name for run in arrays.runs] == ["a/run", "b/run"]


def test_a_figure_is_drawn_again_as_if_it_were_new(tmp_path):
    first = write_run(tmp_path / "a", [1000.0, 1.0], validation=[(2, 1.0)])
    second = write_run(tmp_path / "b", [3.0, 2.5], ranks=1)
    figure = plot_run([first, second])
    for runs in (Run(tmp_path / "none"), first, second):
        assert png(plot_run(runs, figure=figure)) == png(plot_run(runs))


def test_a_run_that_grows_is_read_on(tmp_path):
    folder = write_run(tmp_path / "run", [1.0, 2.0], state="running", updated=time.time())
    run = Run(folder)
    compute_run(run)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 7.0, "lr": 0.1, "time": 3.0}\n{"step": 4, "lo')
    np.testing.assert_array_equal(compute_run(run).runs[0].losses["loss"].y, [1, 2, 7])


def test_a_folder_that_is_not_there_yet_is_a_sentence(tmp_path):
    figure = plot_run(Run(tmp_path / "later"))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "is not there yet" in " ".join(words).replace("\n", " ")
    texts = bundle(figure, compute_run(Run(tmp_path / "later")).facts.numbers)
    assert "waiting" in texts["text/html"] and "waiting" in texts["text/plain"]


def test_a_mistyped_path_is_refused_with_the_runs_that_are_there(tmp_path):
    for name in ("alpha", "beta", "gamma", "run_b"):
        write_run(tmp_path / name, [1.0])
    with pytest.raises(FileNotFoundError, match="run_a is not there; beside it there are the runs"):
        plot_run(tmp_path / "run_a")
    with pytest.raises(FileNotFoundError, match="run_b, alpha, beta and 1 more"):
        plot_run([tmp_path / "alpha", tmp_path / "run_a"])
    with pytest.raises(FileNotFoundError, match=r"nowhere/run is not there; RunFolder\(folder\)"):
        plot_run(tmp_path / "nowhere" / "run")


def test_legends_lie_beside_the_panels(tmp_path):
    figure = plot_run(write_run(tmp_path / "run", [3.0, 2.0, 1.0], ranks=9, validation=[(2, 5.0)]))
    figure.canvas.draw()
    boxes = {axes: axes.get_window_extent() for axes in figure.axes}
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 2
    for legend in legends:
        place = legend.get_window_extent()
        assert not any(place.overlaps(box.padded(-1)) for box in boxes.values())
        assert not any(
            place.overlaps(t.get_window_extent()) for axes in boxes for t in axes.get_yticklabels()
        )


def test_lags_are_points_and_the_line_below_the_title_says_what_to_look_for(tmp_path):
    figure = plot_run(write_run(tmp_path / "run", [3.0, 2.0, 1.0], ranks=3))
    lag = next(axes for axes in figure.axes if axes.get_label() == "run: lag")
    assert [line.get_linestyle() for line in lag.lines] == ["None"]
    assert compute_run(tmp_path / "run").facts.look_for.startswith("Look for: ")


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        plot_run([])
    with pytest.raises(TypeError, match="must be a Run or the path"):
        plot_run([3])
