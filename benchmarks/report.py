"""How a benchmark prints: a table, or with --json one object."""

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version

from rich.console import Console
from rich.table import Table


def run(doc: str, measure: Callable[[], Mapping[str, object]]) -> None:
    """Measures, and prints what was measured.

    Args:
        doc: The benchmark's docstring: the question it answers, and a line `key: meaning` for
            each figure.
        measure: Returns the figures by key.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    figures = measure()
    if as_json:
        print(json.dumps(figures))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "marin-haliax"))
    table = Table(title=f"{doc.splitlines()[0]}\n{versions}, {platform.machine()}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
