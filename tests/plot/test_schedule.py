"""The picture of a schedule shows a step that could run, at the cost that the schedule has."""

from typing import NamedTuple

import pytest

from stackax import ScanCheckpointPolicy
from stackax.plot import plot_schedule
from tests.reference.schedules import optimal_evaluations

RUNS = ("runs", "runs again", "runs again in part")


class Bar(NamedTuple):
    layer: int
    start: float
    stop: float


def bars(policy, layers, **options):
    """What is drawn, by its label in the legend, in the order of time."""
    figure = plot_schedule(policy, layers, **options)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    found = {}
    for container in axes.containers:
        drawn = [Bar(round(b.get_y()), b.get_x(), b.get_x() + b.get_width()) for b in container]
        found[container.get_label()] = sorted(drawn, key=lambda bar: bar.start)
    return found


def runs(found):
    return sorted((bar for what in RUNS for bar in found.get(what, [])), key=lambda b: b.start)


def most_at_once(stretches):
    return max(sum(b.start <= at.start < b.stop for b in stretches) for at in stretches)


SLOTS = [(layers, slots) for layers in (1, 2, 5, 9, 17) for slots in range(1, layers + 1)]


@pytest.mark.parametrize("layers, slots", SLOTS)
def test_slots_are_drawn_at_the_least_number_of_runs_with_as_many_carries(layers, slots):
    found = bars(f"slots={slots}", layers)
    assert len(runs(found)) == optimal_evaluations(layers, slots)
    assert most_at_once(found["carry kept"]) == slots


@pytest.mark.parametrize(
    "policy",
    ["full", "nested", "slots=1", "slots=3", "minimal", ScanCheckpointPolicy(nested=3)],
    ids=str,
)
def test_a_layer_runs_on_what_the_layer_before_has_just_made_or_on_a_kept_carry(policy):
    found = bars(policy, 9)
    work = runs(found)
    for i, run in enumerate(work):
        has_just_been_made = i > 0 and work[i - 1] == Bar(
            run.layer - 1, run.start - (run.stop - run.start), run.start
        )
        is_kept = any(
            c.layer == run.layer and c.start <= run.start <= c.stop for c in found["carry kept"]
        )
        assert has_just_been_made or is_kept, run


@pytest.mark.parametrize("policy", ["none", "full", "nested", "slots=2", "minimal"])
def test_layers_are_differentiated_once_each_from_the_last_on_after_they_ran(policy):
    found = bars(policy, 9)
    derivatives = found["is differentiated"]
    assert [bar.layer for bar in derivatives] == list(reversed(range(9)))
    for derivative in derivatives:
        before = [run.stop for run in runs(found) if run.layer == derivative.layer]
        assert max(before) <= derivative.start


def test_nothing_overlaps_in_time_and_nothing_waits():
    found = bars("slots=3", 9)
    work = sorted(runs(found) + found["is differentiated"], key=lambda bar: bar.start)
    assert [bar.start for bar in work[1:]] == [bar.stop for bar in work[:-1]]


def test_without_remat_nothing_runs_again_and_everything_is_kept():
    found = bars("none", 4)
    assert set(found) == {"runs", "is differentiated", "all values kept"}
    for bar in found["all values kept"]:
        assert bar.stop == next(d.start for d in found["is differentiated"] if d.layer == bar.layer)


def test_names_shorten_what_runs_again():
    found = bars("minimal", 4)
    assert [len(found[what]) for what in ("named values kept", "carry kept")] == [4, 4]
    again = found["runs again in part"]
    assert all(bar.stop - bar.start < 1 for bar in again) and "runs again" not in found


def test_what_is_on_the_host_is_told_apart():
    found = bars("offload", 4)
    assert len(found["carry on the host"]) == 4 and "carry kept" not in found
    assert "named values on the host" in bars("qkv_proj_offloaded", 4)


@pytest.mark.parametrize("policy, fetches", [("full", 2 * 9), ("slots=3", 24)])
def test_a_streamed_stack_has_two_layers_weights_at_most(policy, fetches):
    found = bars(policy, 9, stream=True)
    ahead = found["weights fetched ahead"]
    assert len(ahead) == fetches
    assert [bar.layer for bar in ahead] == [bar.layer for bar in runs(found)]
    assert all(b.stop == run.start for b, run in zip(ahead, runs(found), strict=True))
    assert most_at_once(ahead) == 1  # one is on its way while another runs


def test_panels_share_one_scale_of_time_and_one_legend():
    figure = plot_schedule(["none", "full", True, ScanCheckpointPolicy(nested=3)], layers=9)
    figure.draw_without_rendering()
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["none", "full", "True", "nested=3"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == sorted(set(labels)) and "all values kept" in labels


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(policies="ful"), ValueError, "did you mean 'full'"),
        (dict(policies=[]), ValueError, "no policy to draw"),
        (dict(policies=[None]), TypeError, "a remat policy is"),
        (dict(policies=3), TypeError, "policies=3: a remat policy is"),
        (dict(policies="full", layers=0), ValueError, "layers=0 must be at least 1"),
        (dict(policies="full", layers=2.5), TypeError, "layers=2.5 is of type float"),
        (dict(policies="none", stream=True), ValueError, "can't be differentiated"),
        (dict(policies="minimal", stream=True), ValueError, "keeps more than carries"),
    ],
    ids=str,
)
def test_what_can_not_be_drawn_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        plot_schedule(**options)
