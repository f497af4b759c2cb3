"""`python -m stackax tradeoffs`: what each policy costs, or the one that fits a budget."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..memory import plan, show_bytes
from ..memory._show import as_text, show_flops, table
from ..plot import plot_front, plot_tradeoffs
from .notes import notes
from .options import POLICIES, Parser, as_typed, policy_name, size_in_bytes
from .pictures import add_output, save_picture
from .rows import Row, rows_of
from .sizes import OPTIONS, add_sizes, described, loss, stack_and_input

PRESETS = {
    "transformer": (
        "minimal_with_context",
        "minimal",
        "save_dot_except_mlp",
        "save_qkv_proj",
        "save_out_proj",
    ),
    "mlp": ("minimal",),
}


def add_tradeoffs(commands: Any) -> None:
    """Adds the command to those of a command line.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "tradeoffs",
        help="compare policies by memory, work and time; or fit a budget",
        description=(
            "Prints a row for each policy of one training step, the value and the gradients, of a "
            "stack of blocks: what the backward pass keeps, temporary memory as estimated and as "
            "compiled, what is recomputed, and the time of a step. With --budget it prints the "
            "policy that fits, and exits with status 1 if none does."
        ),
    )
    parser.set_defaults(run=lambda typed: run(typed, parser))
    add_sizes(parser)
    _add_rows(parser.add_argument_group("rows"))
    _add_budget(parser.add_argument_group("budget"))
    add_output(parser, "the rows, or the plan, into a file such as tradeoffs.pdf")


def run(typed: dict[str, Any], parser: Parser) -> int:
    """Compares policies, or plans.

    Args:
        typed: The options.
        parser: Where mistakes in them are reported.

    Returns:
        The exit status: 0, or 1 where no policy fits the budget.
    """
    _check(typed, parser)
    return _plan(typed, parser) if typed["budget"] else _compare(typed, parser)


def _add_rows(group: Any) -> None:
    group.add_argument(
        "--policies",
        nargs="+",
        help=f"one row each: {POLICIES} (default: one or more of each kind)",
        type=policy_name,
        metavar="POLICY",
    )
    group.add_argument("--no-time", action="store_true", help="compile the steps, but run none")


def _add_budget(group: Any) -> None:
    group.add_argument(
        "--budget",
        help="memory for weights, gradients and temporary values, such as 64MiB",
        type=size_in_bytes,
        metavar="SIZE",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="compile the choice, and take the next where the compiler's figure does not fit",
    )


def _check(typed: dict[str, Any], parser: Parser) -> None:
    """Refuses options that would do nothing."""
    if typed["budget"] is None and typed["verify"]:
        parser.error("--verify checks the plan of a budget: type for example --budget 64MiB too")
    if typed["budget"] is not None and (typed["policies"] or typed["no_time"]):
        option = "--policies" if typed["policies"] else "--no-time"
        parser.error(f"{option} is about the rows, of which --budget prints none: leave one out")


def _plan(typed: dict[str, Any], parser: Parser) -> int:
    try:
        stack, x = stack_and_input(typed)
    except ValueError as error:
        parser.error(as_typed(str(error), OPTIONS))
    budget, verify = typed["budget"], typed["verify"]
    try:
        with notes():
            found = plan(loss, stack, x, argnums=0, budget_bytes=budget, verify=verify)
    except ValueError as error:  # not even the arguments fit
        print(as_typed(str(error), {"budget_bytes": "--budget"}), file=sys.stderr)
        return 1
    if typed["json"]:
        print(json.dumps(found.to_dict()))
    else:
        print(f"{described(typed)}\n\n{found}")
    if typed["plot"]:
        save_picture(plot_front(found), typed["plot"], parser)
    return 0 if found.fits else 1


def _compare(typed: dict[str, Any], parser: Parser) -> int:
    policies = list(dict.fromkeys(typed["policies"] or _usual(typed)))
    base = "full" if "full" in policies else policies[0]
    try:
        stack, x = stack_and_input(typed)
        with notes():
            rows = rows_of(policies, stack, x, base=base, is_timed=not typed["no_time"])
    except ValueError as error:
        parser.error(as_typed(str(error), OPTIONS))
    if typed["json"]:
        print(json.dumps({"time_is_relative_to": base, "rows": [row._asdict() for row in rows]}))
    else:
        print(f"{described(typed)}\n\n{as_text(_table(rows, base))}")
    if typed["plot"]:
        save_picture(plot_tradeoffs(rows), typed["plot"], parser)
    return 0


def _usual(typed: dict[str, Any]) -> list[str]:
    """A policy or more of each kind, in the order of what they keep."""
    layers = typed["layers"]
    slots = sorted({max(1, layers // 2), max(1, layers // 6)}, reverse=True)
    carries = ["full", *(f"slots={count}" for count in slots), "nested"]
    return ["none", *PRESETS[typed["block"]], *carries, "offload"]


def _table(rows: Sequence[Row], base: str) -> Group:
    columns = _columns(rows)
    grid = table("", ("policy", *columns), columns)
    grid.title, grid.columns[0].no_wrap = None, True
    for row, *cells in zip(rows, *columns.values(), strict=True):
        grid.add_row(row.policy, *cells)
    return Group(grid, *_legend(rows, base))


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells of each column; one that says nothing is left out."""
    columns = {
        "kept": [show_bytes(row.kept_bytes) for row in rows],
        "on host": [_or_dash(row.offloaded_bytes, show_bytes) for row in rows],
        "estimated": [show_bytes(row.estimated_temp_bytes) for row in rows],
        "compiled": [show_bytes(row.compiled_temp_bytes) for row in rows],
        "passes": [f"{row.forward_evaluations:.2f}" for row in rows],
        "repeated": [_or_dash(row.recomputed_flops, show_flops) for row in rows],
        "time": [_or_dash(row.relative_time, "{:.2f}".format) for row in rows],
        "compiling": [f"{row.compile_seconds:.1f} s" for row in rows],
    }
    return {name: cells for name, cells in columns.items() if set(cells) != {"-"}}


def _or_dash(value: float | None, show: Callable[[Any], str]) -> str:
    return show(value) if value else "-"


def _legend(rows: Sequence[Row], base: str) -> list[Text]:
    lines = [
        "kept: for the backward pass, beside the arguments; estimated, compiled: temporary memory, "
        "what is kept included; passes: forward evaluations in a step"
    ]
    seconds = next(row.seconds for row in rows if row.policy == base)
    if seconds is not None:
        shown = f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
        lines.append(f"time: of a step, over that of {base}, which takes {shown}")
    return [Text(line) for line in lines]
