"""When each layer runs, runs again and is differentiated, and what is kept meanwhile."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._loop.schedule import Program, compile_tree, revolve, schedule_for
from .._policy.policy import RematSpec, ScanCheckpointPolicy, as_policy
from .._sizes import check_size
from ._figure import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    legend_above,
    new_figure,
    text_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In forward runs of a layer; how much names shorten a run depends on the names.
_TIMES = {"runs": 1.0, "runs again": 1.0, "runs again in part": 0.5, "is differentiated": 2.0}
_RUNS = ("runs", "runs again", "runs again in part")
_FETCH_TIME = 1.0

# Where in a layer's row, which is 1 high, something is drawn: its lower edge and its height.
_CELL, _LOWER_HALF, _UPPER_HALF, _LINE = (-0.24, 0.7), (-0.24, 0.35), (0.11, 0.35), (-0.46, 0.16)
# What: place, color, opacity, hatch. In the legend's order.
_STYLES = {
    "runs": (_CELL, SKY, 1.0, None),
    "runs again": (_CELL, VERMILION, 1.0, None),
    "runs again in part": (_CELL, VERMILION, 1.0, None),
    "is differentiated": (_CELL, BLUE, 1.0, None),
    "carry kept": (_LINE, INK, 1.0, None),
    "carry on the host": (_LINE, ORANGE, 1.0, None),
    "named values kept": (_LOWER_HALF, BLUE, 0.3, None),
    "named values on the host": (_UPPER_HALF, ORANGE, 0.5, None),
    "all values kept": (_CELL, GREY, 0.5, None),
    "weights fetched ahead": (_CELL, "white", 1.0, "//////"),
}
_ROW_INCHES, _PANEL_INCHES, _AROUND_INCHES = 0.11, 0.22, 0.45
_LONGEST_LABEL = 24


class Moment(NamedTuple):
    """What one layer does, before it has a time.

    Attributes:
        what: What it is, in the words of the legend.
        layer: The layer.
        keeps_carry: Whether the carry into the layer is put away before.
    """

    what: str
    layer: int
    keeps_carry: bool = False


class Stretch(NamedTuple):
    """What one layer does, or what is kept of it, for a time.

    Attributes:
        what: What it is, in the words of the legend.
        layer: The layer.
        start, stop: When, in forward runs of a layer.
    """

    what: str
    layer: int
    start: float
    stop: float


class Course(NamedTuple):
    """A training step under one policy.

    Attributes:
        label: What to call the policy.
        work: What the layers do.
        kept: What is kept.
        turn: When the forward pass is over.
        summary: How many carries and runs that makes.
    """

    label: str
    work: list[Stretch]
    kept: list[Stretch]
    turn: float
    summary: str


def plot_schedule(
    policies: RematSpec | Sequence[RematSpec], layers: int = 8, *, stream: bool = False
) -> "Figure":
    """Draws when each layer runs, runs again and is differentiated, and what is kept meanwhile.

    Time goes to the right and layers go upward. A panel is a training step under one policy: the
    schedule that the loop follows, out of the same tables. A derivative is drawn as long as two
    forward runs, and a run that begins at named values as long as half of one. The line below a
    layer is the carry into it, from when it is put away until it is read for the last time; a
    layer is hatched from when the fetch of its weights begins until it runs.

    Args:
        policies: A policy or an alias of one, or several.
        layers: How many layers the stack has.
        stream: Whether the layers' weights are fetched one layer ahead, as with `stream=` of a
            stack's `fold`.

    Returns:
        A `matplotlib.figure.Figure`, one column of a paper wide, a panel for each policy.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: A policy is neither one nor an alias of one.
        ValueError: There is no policy of that name, or none is given, or no layer; or a policy
            can't be differentiated in a streamed stack.

    Example:
        >>> from stackax.plot import plot_schedule
        >>> figure = plot_schedule(["full", "slots=3"], layers=9)
        >>> [axes.get_title("right") for axes in figure.axes]
        ['9 carries, 2 runs a layer', '3 carries, 2.67 runs a layer']
    """
    if isinstance(policies, Iterable) and not isinstance(policies, str):
        given = list(policies)
    else:
        given = [policies]
    if not given:
        raise ValueError("plot_schedule has no policy to draw: give one, such as 'full'")
    check_size("layers", layers)
    courses = [_course(policy, layers, stream) for policy in given]
    panel = _PANEL_INCHES + _ROW_INCHES * layers
    figure, panels = new_figure(_AROUND_INCHES + panel * len(courses), rows=len(courses))
    for axes, course in zip(panels, courses, strict=True):
        _draw(axes, course, layers)
    end = max(stretch.stop for course in courses for stretch in course.work)
    panels[-1].set_xlim(0, 1.01 * end)
    panels[-1].set_xlabel("time of a training step", **text_style())
    legend_above(figure, *panels)
    return figure


def _draw(axes: "Axes", course: Course, layers: int) -> None:
    drawn = [*course.kept, *course.work]
    for what, ((lower, height), color, opacity, hatch) in _STYLES.items():
        some = [stretch for stretch in drawn if stretch.what == what]
        if some:
            axes.bar(
                [stretch.start for stretch in some],
                height,
                [stretch.stop - stretch.start for stretch in some],
                [stretch.layer + lower for stretch in some],
                align="edge",
                color=color,
                alpha=opacity,
                hatch=hatch,
                edgecolor=GREY if hatch else "white",
                linewidth=0.4,
                label=what,
                zorder=1 if opacity < 1 else 2,
            )
    axes.axvline(course.turn, color=GREY, linewidth=0.6, linestyle=(0, (1, 2)), zorder=0)
    axes.set_ylim(-0.6, layers - 0.4)
    axes.set_xticks([])
    axes.set_yticks(sorted({0, layers - 1}))
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("layer", **text_style())
    axes.set_title(course.label, loc="left", pad=3, **text_style(fontweight="bold"))
    axes.set_title(course.summary, loc="right", pad=3, **text_style())


def _course(given: RematSpec, layers: int, stream: bool) -> Course:
    policy = as_policy(given, "policies")
    if stream and (policy.has_names or not policy.recomputes):
        raise ValueError(
            f"a streamed stack can't be differentiated under {given!r}, which keeps more than "
            "carries: draw 'full', 'nested' or 'slots=3' with stream=True"
        )
    tree = schedule_for(layers, nested=policy.nested, slots=policy.slots)
    program = compile_tree(tree or revolve(layers, layers))
    moments = list(_moments(program, policy))
    work = list(_timed(moments, _FETCH_TIME if stream else 0.0))
    kept = list(_kept(moments, work, policy))
    fetches = list(_fetches(work)) if stream else []
    return Course(
        label=_label(given),
        work=[*work, *fetches],
        kept=kept,
        turn=work[layers - 1].stop,
        summary=_summary(program, policy, moments),
    )


def _moments(program: Program, policy: ScanCheckpointPolicy) -> Iterator[Moment]:
    """What is done, in order."""
    steps = len(program.restore)
    keeps = {int(start) for start, stop in program.forward if start < stop and policy.recomputes}
    yield from (Moment("runs", step, step in keeps) for step in range(steps))
    again = "runs again in part" if policy.has_names else "runs again"
    for step in reversed(range(steps)):
        if policy.recomputes:
            for _, start, stop in program.advances[program.first[step] : program.last[step]]:
                yield from (Moment(again, int(i), i == start) for i in range(start, stop))
            yield Moment(again, step)
        yield Moment("is differentiated", step)


def _timed(moments: Sequence[Moment], pause: float) -> Iterator[Stretch]:
    """The moments one after the other, with a pause before each pass."""
    now = pause
    for i, (what, layer, _) in enumerate(moments):
        if i and moments[i - 1].what == "runs" != what:
            now += pause
        yield Stretch(what, layer, now, now + _TIMES[what])
        now += _TIMES[what]


def _kept(
    moments: Sequence[Moment], work: Sequence[Stretch], policy: ScanCheckpointPolicy
) -> Iterator[Stretch]:
    """What waits for the backward pass, and for how long."""
    if policy.recomputes:
        yield from _carries(moments, work, policy)
    else:
        yield from _insides(work, "all values kept")
    if policy.saved_names:
        yield from _insides(work, "named values kept")
    if policy.offloaded_names:
        yield from _insides(work, "named values on the host")


def _carries(
    moments: Sequence[Moment], work: Sequence[Stretch], policy: ScanCheckpointPolicy
) -> Iterator[Stretch]:
    what = "carry on the host" if policy.save_carries == "offload" else "carry kept"
    # The last run of a layer is that before its derivative, and its carry's last use.
    last = {stretch.layer: stretch.start for stretch in work if stretch.what in _RUNS}
    kept: set[int] = set()
    for moment, stretch in zip(moments, work, strict=True):
        if moment.keeps_carry and moment.layer not in kept:
            kept.add(moment.layer)
            yield Stretch(what, moment.layer, stretch.start, last[moment.layer])


def _insides(work: Sequence[Stretch], what: str) -> Iterator[Stretch]:
    """What a layer's first run leaves to the next thing that is done with the layer."""
    for layer in sorted({stretch.layer for stretch in work}):
        first, then, *_ = (stretch for stretch in work if stretch.layer == layer)
        yield Stretch(what, layer, first.stop, then.start)


def _fetches(work: Sequence[Stretch]) -> Iterator[Stretch]:
    """From when a layer's fetch begins, with the run of the layer before it, until it runs."""
    runs = [stretch for stretch in work if stretch.what in _RUNS]
    for before, stretch in zip([None, *runs], runs, strict=False):
        if before is not None and before.what == stretch.what:
            begins = before.start
        else:  # a pass begins with a fetch
            begins = stretch.start - _FETCH_TIME
        yield Stretch("weights fetched ahead", stretch.layer, begins, stretch.start)


def _summary(program: Program, policy: ScanCheckpointPolicy, moments: Sequence[Moment]) -> str:
    """How many carries are kept at once, and how often a layer runs."""
    if not policy.recomputes:
        return "all values, 1 run a layer"
    carries = f"{program.slots} carries" if program.slots > 1 else "1 carry"
    if policy.has_names:
        return f"{carries} and names, 1 to 2 runs a layer"
    runs = sum(moment.what in _RUNS for moment in moments) / len(program.restore)
    return f"{carries}, {runs:.3g} runs a layer"


def _label(given: RematSpec) -> str:
    if isinstance(given, str):
        return given
    text = repr(given).removeprefix("ScanCheckpointPolicy(").removesuffix(")")
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…"
