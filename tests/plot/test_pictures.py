"""The pictures draw what they are given: read back from the figures' own artists."""

import dataclasses
import sys
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stackax import ScanCheckpointPolicy, Stacked, checkpoint_name
from stackax.memory import explain, plan
from stackax.plot import plot_front, plot_residuals, plot_timeline, plot_tradeoffs
from tests.zoo import platform_warnings_ignored

MEBIBYTE = 2**20
LAYERS = hax.Axis("layers", 4)


class Block(eqx.Module):
    """A residual block with one named value of 1 MiB, on a carry of 256 KiB."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        hidden = checkpoint_name(x @ self.up, "hidden")
        return x + jnp.tanh(hidden) @ self.down


def draw(key):
    return Block(jnp.ones((64, 256)), jnp.ones((256, 64)))


@pytest.fixture(scope="module")
def stack():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    return eqx.filter_eval_shape(lambda k: Stacked.init(LAYERS, draw)(jax.random.key(0)), keys)


@pytest.fixture(scope="module")
def x():
    return jax.ShapeDtypeStruct((1024, 64), jnp.float32)


@pytest.fixture(scope="module")
def planned(stack, x):
    return plan(stack, x, budget_bytes="8 MiB")


def bars(figure):
    """The drawn sizes, by label."""
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    return dict(zip(labels, [bar.get_width() for bar in axes.patches], strict=True))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def drawn(figure):
    """Draws the figure, so that what can only fail then does."""
    figure.draw_without_rendering()
    return figure


def test_bars_add_up_to_what_is_kept_and_leave_arguments_out(stack, x):
    report = explain(stack, x, remat="none")
    figure = drawn(plot_residuals(report))
    assert "(MiB)" in figure.axes[0].get_xlabel()
    sizes = bars(figure)
    assert sum(sizes.values()) * MEBIBYTE == pytest.approx(report.kept_bytes, rel=1e-9)
    assert report.residual_bytes > report.kept_bytes
    assert not any(label.startswith("stack") for label in sizes)


def test_a_named_value_has_its_own_bar_and_an_unnamed_one_its_line(stack, x):
    policy = ScanCheckpointPolicy(save_block_internals=["hidden"])
    sizes = bars(plot_residuals(explain(stack, x, remat=policy)))
    assert sizes["hidden"] == 4.0 and sizes["carry"] == 1.0
    without = bars(plot_residuals(explain(stack, x, remat="none")))
    assert any("test_pictures.py:" in label for label in without)


def test_what_is_on_the_host_is_told_apart(stack, x):
    policy = ScanCheckpointPolicy(offload_block_internals=["hidden"])
    with platform_warnings_ignored():
        report = explain(stack, x, remat=policy)
    figure = plot_residuals(report)
    kinds = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "on the host" in kinds and "without a name" in kinds
    on_host = [bar for bar in figure.axes[0].patches if bar.get_hatch()]
    assert [bar.get_width() for bar in on_host] == [4.0]


def test_many_small_values_become_one_bar():
    def f(x):
        return sum(jnp.sin(i * x).sum() for i in range(12)) + jnp.cos(jnp.ones(10**5) * x[0]).sum()

    report = explain(f, jnp.ones(8))
    sizes = bars(drawn(plot_residuals(report)))
    assert any(label.endswith("smaller") for label in sizes)
    assert sum(sizes.values()) * 1024 == pytest.approx(report.kept_bytes, rel=1e-9)


def test_a_step_that_keeps_nothing_is_drawn_too():
    report = explain(lambda x: x.sum(), jnp.ones(4))
    assert bars(drawn(plot_residuals(report))) == {"nothing": 0}


def test_the_front_is_drawn_at_its_peaks_and_forward_passes(planned):
    figure = drawn(plot_front(planned))
    points = {tuple(at) for c in figure.axes[0].collections for at in c.get_offsets().tolist()}
    for point in planned.front:
        at = point.peak_bytes / MEBIBYTE, point.forward_evaluations - 1
        assert any(at == pytest.approx(other) for other in points)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "chosen" in labels and "as compiled" not in labels
    assert texts(figure.axes[0]) == ["budget"]


def test_a_budget_that_nothing_fits_is_said_in_the_legend(stack, x):
    figure = drawn(plot_front(plan(stack, x, budget_bytes="1.5 MiB")))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert any("nothing fits" in label for label in labels)


def test_the_compilers_figure_is_drawn_where_there_is_one(planned):
    verified = dataclasses.replace(planned, compiled_peak_bytes=7 * MEBIBYTE)
    labels = plot_front(verified).axes[0].get_legend().get_texts()
    assert "as compiled" in [text.get_text() for text in labels]


def test_the_timelines_peak_is_the_reports(stack, x):
    report = explain(stack, x, remat="full")
    figure = drawn(plot_timeline(report))
    highest = max(moment.live_bytes for moment in report.peak.timeline)
    total = report.peak.argument_bytes + report.peak.output_bytes + highest
    assert texts(figure.axes[0]) == [f"{total / MEBIBYTE:.4g} MiB"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward pass", "backward pass", "arguments, outputs"]


def test_a_timeline_without_loops_is_drawn(planned):
    drawn(plot_timeline(explain(lambda x: jnp.sin(x @ x).sum(), jnp.ones((64, 64)))))


def row(policy, mebibytes, passes, time=None):
    return SimpleNamespace(
        policy=policy,
        compiled_temp_bytes=mebibytes * MEBIBYTE,
        estimated_temp_bytes=1.1 * mebibytes * MEBIBYTE,
        forward_evaluations=passes,
        relative_time=time,
    )


@pytest.mark.parametrize(
    "time, label", [(1.0, "time of a step\n(full = 1)"), (None, "forward passes\nof a step")]
)
def test_tradeoffs_are_sorted_by_memory(time, label):
    rows = [row("full", 8, 1.8, time), row("none", 64, 1.0, time and 0.9)]
    figure = drawn(plot_tradeoffs(rows))
    memory, work = figure.axes
    assert [text.get_text() for text in memory.get_yticklabels()] == ["none", "full"]
    assert work.get_xlabel() == label
    compiled = memory.collections[0].get_offsets().tolist()
    assert compiled == [[64, 0], [8, 1]]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        plot_tradeoffs([])


def test_without_matplotlib_the_extra_is_named(planned, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'stackax\[plot\]'"):
        planned.plot()
