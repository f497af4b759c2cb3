"""How a bill is printed: in a terminal, in a notebook and as text."""

import collections
import io
import re
import shutil
from collections.abc import Collection, Iterable
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._policy.policy import ScanCheckpointPolicy
from ._bytes import show_bytes
from ._residuals import Residual

_MOST_ROWS = 16
_WIDTH = 110  # of a text that no terminal shows


def as_text(renderable: Any) -> str:
    """What rich would print, without colours, as wide as the terminal."""
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable, end="")
    return console.file.getvalue().rstrip("\n")  # pyright: ignore[reportAttributeAccessIssue]


def bill(report: Any) -> RenderableType:
    """The report as tables: what is kept, then the totals, then the findings."""
    return Group(_kept(report), Text(), _totals(report), *_findings(report))


def table(title: str, columns: Iterable[str], numeric: Collection[str] = ()) -> Table:
    """An empty table in the one style of this library."""
    grid = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        is_number = column in numeric
        justify = "right" if is_number else "left"
        grid.add_column(column, justify=justify, no_wrap=is_number, overflow="fold")
    return grid


def front_table(plan: Any) -> RenderableType:
    """The plan as a table of its front, with the choice marked, and the reason."""
    numbers = ("peak", "temporary", "host", "forward passes", "repeated")
    grid = table(f"Budget {show_bytes(plan.budget_bytes)}", ("", "policy", *numbers), numbers)
    for point in plan.front:
        grid.add_row(
            ">" if point is plan.chosen else "",
            show_policy(point.policy),
            show_bytes(point.peak_bytes),
            show_bytes(point.temp_bytes),
            show_bytes(point.offloaded_bytes) if point.offloaded_bytes else "-",
            f"{point.forward_evaluations:.2f}",
            show_flops(point.recomputed_flops),
            style="bold" if point is plan.chosen else None,
        )
    return Group(grid, Text(plan.reason))


def show_policy(policy: ScanCheckpointPolicy) -> str:
    """A policy in the fewest words that make it again."""
    if policy.disable:
        return "none"
    if policy == ScanCheckpointPolicy(simple=True):
        return "full"
    return repr(policy).removeprefix("ScanCheckpointPolicy")[1:-1]


def _kept(report: Any) -> Table:
    numbers = ("each", "x", "bytes")
    columns = ("value", "type", *numbers, "made at", "because")
    grid = table("What the backward pass keeps", columns, numbers)
    own = collections.defaultdict(list)
    for r in report.residuals:
        if r.kind != "argument":
            own[_cells(r)].append(r)
    groups = sorted(own.items(), key=lambda group: -_bytes(group[1]))
    for (label, kind, each, layers, *rest), rows in groups[:_MOST_ROWS]:
        count = f" ({len(rows)} of them)" if rows[1:] else ""
        grid.add_row(label + count, kind, each, layers, _total(rows), *rest)
    if rest := [r for _, rows in groups[_MOST_ROWS:] for r in rows]:
        grid.add_row(f"{len(rest)} smaller", "", "", "", _total(rest), "", "")
    if arguments := [r for r in report.residuals if r.kind == "argument"]:
        what = f"{len(arguments)} argument{'s' if arguments[1:] else ''}"
        grid.add_row(what, "", "", "", _total(arguments), "", "they are there anyway")
    return grid


def _cells(r: Residual) -> tuple[str, ...]:
    """The cells of a row, but for its bytes."""
    return (
        r.label + (" on the host" if r.memory == "host" else ""),
        show_type(r.dtype, r.shape),
        show_bytes(r.bytes_per_layer),
        " x ".join(map(str, r.layers)) or "once",
        r.source.split(" (")[0].split("/")[-1],
        r.why.split(",")[0],
    )


def show_type(dtype: Any, shape: tuple[int, ...]) -> str:
    """A type as JAX writes it in programs, such as `f32[8,128]`."""
    name = re.sub(r"^(u?int|b?float|complex)(?=\d)", lambda kind: _SHORT[kind[1]], str(dtype))
    return f"{name}[{','.join(map(str, shape))}]"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def _total(rows: list[Residual]) -> str:
    return show_bytes(_bytes(rows))


def _bytes(rows: list[Residual]) -> int:
    return sum(r.bytes for r in rows)


def _totals(report: Any) -> Table:
    grid = Table.grid(padding=(0, 2))
    peak = report.peak
    lines = [
        ("kept on the device", show_bytes(report.kept_bytes), "beside the arguments"),
        ("kept on the host", show_bytes(report.offloaded_bytes), ""),
        ("working set", show_bytes(peak.working_bytes), "of the most demanding loop"),
        (
            "temporary memory",
            show_bytes(peak.temp_bytes),
            f"estimated; the compiler's is expected from {show_bytes(peak.low_bytes)} "
            f"to {show_bytes(peak.high_bytes)}",
        ),
        ("arguments", show_bytes(peak.argument_bytes), ""),
        (
            "outputs",
            show_bytes(peak.output_bytes),
            f"of them gradients {show_bytes(report.gradient_bytes)}",
        ),
        ("peak", show_bytes(report.peak_bytes), "arguments + outputs + temporary memory"),
        (
            "work",
            show_flops(report.flops),
            f"of them repeated {show_flops(report.recomputed_flops)}; the forward pass runs "
            f"{report.forward_evaluations:.2f} times",
        ),
    ]
    for name, value, note in lines:
        if name != "kept on the host" or report.offloaded_bytes:
            grid.add_row(name, Text(value, justify="right"), Text(note, style="dim"))
    if report.has_unknown_loops:
        grid.add_row("", "", "a loop whose trips only its data decides was counted once")
    return grid


def _findings(report: Any) -> list[RenderableType]:
    if not report.findings:
        return [Text("\nNo waste found.")]
    numbers = ("bytes",)
    grid = table("\nWaste", ("bytes", "what", "where", "what to do"), numbers)
    for finding in report.findings:
        size = show_bytes(finding.bytes) if finding.bytes else "-"
        grid.add_row(size, finding.what, finding.source, finding.fix)
    return [grid]


def show_flops(flops: float) -> str:
    """A number of floating-point operations with a decimal prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.2f} {prefix}FLOP"
    return f"{flops:.0f} FLOP"
