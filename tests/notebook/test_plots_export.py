"""Bytes, bundles, labels, memory, and that nothing of matplotlib is touched but what is drawn."""

import html
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from io import BytesIO
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image

from nvalchemi.notebook.export import alt_text, bundle, png, save, svg
from nvalchemi.notebook.plots import VIEWS
from nvalchemi.notebook.plots.facts import SIGN
from nvalchemi.sharding import ShardPlan

HERE = str(Path(__file__).parent)


def small(world_size: int = 4) -> ShardPlan:
    sizes = np.random.default_rng(0).integers(5, 99, 9000)
    return ShardPlan([8000, 1000], world_size=world_size, batch_size=8, epochs=2, sizes=sizes)


def arguments(view: str, world_size: int = 2) -> dict[str, object]:
    return {"other": small(world_size), "stop": 20} if view == "resume" else {}


def in_process(code: str) -> str:
    script = f"import sys\nsys.path.insert(0, {HERE!r})\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("view", VIEWS)
def test_a_redrawn_figure_has_the_bytes_of_a_new_one(view):
    view = VIEWS[view]
    one = view.compute(small(), **arguments(view.name))
    other = view.compute(small(16), **arguments(view.name, 4))
    figure = view.draw(other)
    png(figure)
    axes = list(figure.axes)
    assert png(view.draw(one, figure)) == png(view.draw(one))
    assert svg(figure) == svg(view.draw(one))
    assert view.name == "batch" or axes == figure.axes


def test_equal_plans_give_equal_bytes_in_other_processes():
    code = """
        import hashlib
        from test_plots_export import VIEWS, arguments, png, small, svg
        for name, view in VIEWS.items():
            figure = view.draw(view.compute(small(), **arguments(name)))
            print(name, hashlib.sha256(png(figure) + svg(figure)).hexdigest())
    """
    first = in_process(code)
    assert len(set(first.split())) == 2 * len(VIEWS)
    # a user's own style does not change them
    styled = "import matplotlib\nmatplotlib.rcParams.update({'font.size': 20, 'axes.grid': True})\n"
    assert in_process(styled + textwrap.dedent(code)) == first


@pytest.mark.parametrize("view", VIEWS)
def test_pictures_say_what_they_show(view):
    arrays = VIEWS[view].compute(small(), **arguments(view))
    figure = VIEWS[view].draw(arrays)
    words = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    shown = "\n".join(words)
    assert arrays.facts.question in words and arrays.facts.look_for in words
    assert small().hash in shown and "9,000 samples" in shown
    assert arrays.facts.truth.partition(":")[0].upper() in words
    for number in arrays.facts.numbers[:8]:
        assert number.name in words
        assert (f"{SIGN} {number.value}" if number.wrong else number.value) in words
    for axes in figure.axes:
        named = axes.get_xlabel() or axes.get_ylabel() or axes.get_title() or axes.get_title("left")
        assert named, axes.get_label()
    assert alt_text(figure) == arrays.facts.alt and arrays.facts.question in arrays.facts.alt


def test_png_and_svg_carry_the_words(tmp_path):
    view = VIEWS["assignment"]
    arrays = view.compute(small())
    figure = view.draw(arrays)
    image = Image.open(BytesIO(png(figure)))
    assert image.size == (900, 520) and image.mode == "RGB"
    assert image.text["Description"] == arrays.facts.alt
    assert image.getpixel((2, 2)) == (255, 255, 255)
    root = ElementTree.fromstring(svg(figure))
    assert arrays.facts.question in "".join(root.itertext())
    assert Image.open(save(figure, tmp_path / "a.png")).size == (1800, 1040)
    assert save(figure, tmp_path / "a.svg").read_bytes() == svg(figure)
    with pytest.raises(ValueError, match="written as .png or .svg"):
        save(figure, tmp_path / "a.pdf")


def test_the_bundle_has_picture_table_and_text():
    from plot_cases import RankBlind

    view = VIEWS["assignment"]
    arrays = view.compute(ShardPlan(96, sampler=RankBlind, world_size=4, batch_size=4))
    out = bundle(view.draw(arrays), arrays.facts.numbers)
    assert set(out) == {"text/html", "text/plain"} and out["text/plain"] == arrays.facts.alt
    html = out["text/html"].replace('"><table>', '"/><table>')  # as XML, to be parsed
    root = ElementTree.fromstring(f"<div>{html}</div>")
    assert root.find("img").get("alt") == arrays.facts.alt
    cells = [cell.text for cell in root.iter("td")]
    assert cells == [f"{SIGN} {n.value}" if n.wrong else n.value for n in arrays.facts.numbers]


def test_no_pyplot_and_no_settings_are_touched():
    out = in_process("""
        import sys
        import matplotlib
        matplotlib.rcParams["font.size"] = 17
        def settings():  # to ask for the backend would load pyplot
            names = set(matplotlib.rcParams) - {"backend"}
            return {name: matplotlib.rcParams[name] for name in names}
        before = settings()
        from test_plots_export import VIEWS, arguments, png, small
        for name, view in VIEWS.items():
            png(view.draw(view.compute(small(), **arguments(name))))
        print("matplotlib.pyplot" in sys.modules, settings() == before)
    """)
    assert out == "False True"


def test_the_package_of_the_views_loads_no_matplotlib():
    code = "import sys, nvalchemi.notebook.plots; print('matplotlib' in sys.modules)"
    assert in_process(code) == "False"


def test_memory_at_a_hundred_million_samples():
    out = in_process("""
        import resource
        import numpy as np
        from nvalchemi.data.datapipes import EpochSampler
        from test_plots_export import VIEWS, ShardPlan, png, small
        sizes = np.tile(np.arange(5, 105, dtype=np.uint8), 10**6)
        options = {"batch_size": 64, "epochs": 2, "sampler": EpochSampler, "sizes": sizes}
        plan = ShardPlan(10**8, world_size=1024, **options)
        half = ShardPlan(10**8, world_size=512, **options)
        for view in VIEWS.values():  # what drawing itself takes
            more = {"other": small(2), "stop": 2} if view.name == "resume" else {}
            png(view.draw(view.compute(small(), **more)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for view in VIEWS.values():
            more = {"other": half, "stop": 300} if view.name == "resume" else {}
            png(view.draw(view.compute(plan, **more)))
        for name in ("assignment", "composition", "load", "order"):
            arrays = next(VIEWS[name].refine(plan))
            assert not arrays.facts.exact
            png(VIEWS[name].draw(arrays))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    assert int(out) < 200 * 1024, f"{int(out) // 1024} MB"


def test_a_picture_shows_itself_in_a_notebook_with_its_alt_text():
    code = (
        "from nvalchemi.notebook.plots import plot_overlap\n"
        "from nvalchemi.sharding import ShardPlan\n"
        "plot_overlap(ShardPlan([20, 20], world_size=2, batch_size=4))"
    )
    cell = nbformat.v4.new_code_cell(code)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=100).execute()
    (output,) = notebook.cells[0].outputs
    assert output["data"]["image/png"]
    # the template "lab" of nbconvert 7.17 has no place for alt texts, not even for these
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
    assert f'alt="{html.escape(output["metadata"]["image/png"]["alt"])}"' in page
    assert "Do two ranks train on the same samples?" in page
