"""Plots show what was recorded, in each method's own look, with the legend clear of the data."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from fop_bench import plots
from fop_bench.landscape import Landscape, Step
from fop_bench.memory import Measurement
from fop_bench.plots.curves import XAxis
from fop_bench.plots.surface import arrow_end, best_step
from fop_bench.records import load_runs
from fop_bench.style import LOOKS, look, order
from fop_bench.summary import summarise
from tests.bench.recorded import write_comparison, write_run, write_sweep


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comparison")
    write_comparison(root)
    return root


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def assert_legend_clear_of_data(figure: Figure) -> None:
    """No pixel of a legend lies inside the frame of a panel."""
    figure.canvas.draw()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(a.get_window_extent()) for a in figure.axes if a.get_visible())


def surface(plane: str = "random") -> Landscape:
    places = tuple(np.linspace(-1, 1, 9).tolist())
    losses = tuple(tuple(x * x + 2 * y * y for x in places) for y in places)
    steps = (
        Step("sgd", 0.001, 0.002, loss=0.9, share=0.02),
        Step("kfac", -0.3, 0.1, loss=0.7, share=0.5),
        Step("fop", 0.2, 0.2, loss=0.5, share=0.4),
    )
    return Landscape("digits-mlp", 512, 0, plane, places, places, losses, 1.0, steps)


def measurements() -> list[Measurement]:
    sizes = {"sgd": 2e7, "kfac": 3e7, "fop": math.inf}
    return [Measurement("digits-mlp", m, b, "cpu", s * b) for b in (1, 2) for m, s in sizes.items()]


@pytest.mark.parametrize("x", ["epochs", "time"])
def test_curves_have_a_panel_for_each_batch_and_a_line_for_each_method(
    comparison: Path, x: XAxis
) -> None:
    runs = load_runs(comparison)
    figure = plots.curves(runs, x)
    assert [a.get_title() for a in figure.axes] == [
        f"batch size {b}" for b in ("256", "1,024", "4,096")
    ]
    assert labels(figure) == ["SGD", "AdamW", "KFAC", "KFAC, 2× lr", "FOP", "target"]
    assert_legend_clear_of_data(figure)


def test_curves_draw_the_mean_of_the_seeds(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracies=[0.2, 0.4], times=[1, 2])
    write_run(tmp_path, seed=1, accuracies=[0.4, 0.8], times=[3, 4])
    axis = plots.curves(load_runs(tmp_path), "time").axes[0]
    line = next(one for one in axis.lines if one.get_color() == look("sgd").colour)
    assert np.asarray(line.get_xdata()).tolist() == pytest.approx([2, 3])
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([0.3, 0.6])
    assert any(one.get_linestyle() == ":" for one in axis.lines)


def test_curves_of_unequal_length_lose_no_run(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracies=[0.2, 0.4, 0.6])
    write_run(tmp_path, seed=1, accuracies=[0.3], status="diverged")
    axis = plots.curves(load_runs(tmp_path)).axes[0]
    lengths = sorted(len(np.asarray(one.get_xdata())) for one in axis.lines)
    assert lengths == [1, 2, 3]  # the mean, the target line's two ends, the longer seed


def test_curves_survive_a_method_without_a_single_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=[], status="diverged")
    write_run(tmp_path, method="fop", accuracies=[0.2, None, 0.6])
    assert plots.png(plots.curves(load_runs(tmp_path), "time")).startswith(b"\x89PNG")


def test_plots_of_several_workloads_at_once_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=[0.5])
    write_run(tmp_path, workload="fashion-mlp", accuracies=[0.5])
    runs = load_runs(tmp_path)
    with pytest.raises(ValueError, match="one workload"):
        plots.curves(runs)
    with pytest.raises(ValueError, match="one workload"):
        plots.target_by_batch(summarise(runs))
    with pytest.raises(ValueError, match="one workload"):
        plots.memory_bars([])


def test_misses_are_drawn_hollow_above_everything_reached(comparison: Path) -> None:
    figure = plots.target_by_batch(summarise(load_runs(comparison)))
    lines = figure.axes[0].lines
    hollow = [one for one in lines if one.get_markerfacecolor() == "white"]
    misses = [y for one in hollow for y in np.asarray(one.get_ydata())]
    reached = [y for one in lines if one not in hollow for y in np.asarray(one.get_ydata())]
    assert len(misses) == 3  # SGD at 1,024 with one seed of three, SGD and AdamW at 4,096
    assert min(misses) > max(reached)
    assert_legend_clear_of_data(figure)


def test_published_figures_get_a_panel_that_says_so(tmp_path: Path) -> None:
    for batch in (2048, 4096):
        write_run(
            tmp_path, workload="cifar10-resnet18", method="fop", batch_size=batch,
            accuracies=[0.5, 0.92],
        )  # fmt: skip
    rows = summarise(load_runs(tmp_path))
    figure = plots.target_by_batch(rows, "seconds")
    assert [axis.get_title() for axis in figure.axes] == ["this record", "published"]
    assert len(plots.target_by_batch(rows, with_published=False).axes) == 1


def test_damping_sweep_is_logarithmic_with_the_target_line(tmp_path: Path) -> None:
    write_sweep(tmp_path, "damping", (1e-5, 1e-4, 1e-3, 1e-2))
    figure = plots.sweep(load_runs(tmp_path), "damping")
    axis = figure.axes[0]
    assert axis.get_xscale() == "log"
    assert [a.get_title() for a in figure.axes] == ["batch size 1,024", "batch size 4,096"]
    kfac = next(
        o for o in axis.lines if o.get_color() == look("kfac").colour and o.get_marker() == "^"
    )
    assert np.asarray(kfac.get_xdata()).tolist() == [1e-5, 1e-4, 1e-3, 1e-2]
    assert any(list(np.asarray(one.get_ydata())) == [0.9, 0.9] for one in axis.lines)
    assert_legend_clear_of_data(figure)


def test_a_sweep_over_words_and_numbers_has_a_place_for_each(tmp_path: Path) -> None:
    write_sweep(tmp_path, "beta", (0.1, "adaptive", -0.1))
    axis = plots.sweep(load_runs(tmp_path), "beta").axes[0]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["-0.1", "0.1", "adaptive"]
    with pytest.raises(ValueError, match="kl_clip"):
        plots.sweep(load_runs(tmp_path), "kl_clip")


def test_ablation_has_a_line_for_each_pair_and_for_kfac(tmp_path: Path) -> None:
    for name, options in (("a", {"beta": 0.1, "eta": 1.0}), ("b", {})):
        write_run(tmp_path / name, method="fop", accuracies=[0.9], options=options)
    write_run(tmp_path, method="kfac", accuracies=[0.8])
    axis = plots.ablation(load_runs(tmp_path)).axes[0]
    shown = [text.get_text() for text in axis.get_yticklabels()]
    assert shown == ["FOP: η adaptive, β adaptive", "FOP: η 1, β 0.1", "KFAC: η 1, β 0"]


def test_memory_bars_are_as_high_as_measured_and_tell_what_did_not_fit() -> None:
    figure = plots.memory_bars(measurements())
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    heights = sorted(bar.get_height() for bar in bars)
    assert heights == pytest.approx([20, 30, 40, 60])
    assert sum(t.get_text() == "out of memory" for t in figure.axes[0].texts) == 2
    assert_legend_clear_of_data(figure)


def test_arrows_end_at_the_steps_or_show_their_direction() -> None:
    kfac = surface().steps[1]
    assert arrow_end(surface("steps"), kfac) == (kfac.x, kfac.y)
    ends = [arrow_end(surface("random"), step) for step in surface().steps]
    assert [math.hypot(*end) for end in ends] == pytest.approx([0.62] * 3)
    assert math.atan2(*ends[1]) == pytest.approx(math.atan2(kfac.x, kfac.y))
    winner = best_step(surface())
    assert winner is not None
    assert winner.method == "fop"


@pytest.mark.parametrize("draw", [plots.landscape_contour, plots.landscape_3d])
@pytest.mark.parametrize("plane", ["random", "steps"])
def test_landscapes_show_an_arrow_for_each_method(draw: object, plane: str, tmp_path: Path) -> None:
    assert callable(draw)
    figure = draw(surface(plane))
    assert labels(figure)[:-1] == [
        "start: loss 1.000", "SGD: loss 0.900", "KFAC: loss 0.700", "FOP: loss 0.500",
    ]  # fmt: skip
    image = np.asarray(Image.open(plots.save(figure, tmp_path / "l.png", dpi=60)).convert("RGB"))
    for method in ("kfac", "fop"):
        colour = np.array([round(255 * part) for part in to_rgb(look(method).colour)])
        assert (np.abs(image.astype(int) - colour).sum(axis=2) < 12).sum() > 40


def test_the_same_records_give_the_same_picture(comparison: Path) -> None:
    runs = load_runs(comparison)
    assert plots.png(plots.curves(runs)) == plots.png(plots.curves(runs))


def test_a_picture_is_saved_whole_or_refused(tmp_path: Path, comparison: Path) -> None:
    figure = plots.curves(load_runs(comparison))
    with Image.open(plots.save(figure, tmp_path / "new" / "c.png")) as image:
        assert image.width > 1000
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["c.png"]
    with pytest.raises(ValueError, match=r"\.png, \.pdf or \.svg"):
        plots.save(figure, tmp_path / "c.jpeg")


def test_every_method_has_a_look_of_its_own() -> None:
    from fop_bench.methods import METHODS

    assert set(METHODS) <= set(LOOKS)
    assert len({(shown.colour, shown.line) for shown in LOOKS.values()}) == len(LOOKS)
    assert len({shown.marker for shown in LOOKS.values()}) == len(LOOKS)
    assert look("unheard-of") == look("unheard-of")
    assert sorted(["zz", "fop", "sgd"], key=order) == ["sgd", "fop", "zz"]


def test_colours_stay_apart_for_the_colour_blind() -> None:
    """Simulated deuteranopia and protanopia (Viénot 1999) in linear RGB, distances in sRGB."""
    simulations = {
        "deuteranopia": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
        "protanopia": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    }
    colours = {m: np.array(to_rgb(s.colour)) for m, s in LOOKS.items() if not s.dashed}
    main = ["sgd", "adamw", "kfac", "fop"]
    for matrix in simulations.values():
        seen = {m: (np.array(matrix) @ colours[m] ** 2.2).clip(0, 1) ** (1 / 2.2) for m in main}
        for i, one in enumerate(main):
            for other in main[i + 1 :]:
                assert np.linalg.norm(seen[one] - seen[other]) > 0.15, (one, other)


def test_a_method_far_below_the_target_is_named_where_it_cannot_be_seen(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=[0.1, 0.11], target=0.9)
    write_run(tmp_path, method="fop", accuracies=[0.2, 0.92, 0.93], target=0.9)
    axis = plots.curves(load_runs(tmp_path)).axes[0]
    assert [text.get_text() for text in axis.texts] == ["never in view: SGD"]
    assert axis.get_ylim()[0] == pytest.approx(0.75)
    assert axis.get_xlim() == pytest.approx((0, 3 * 1.03))
