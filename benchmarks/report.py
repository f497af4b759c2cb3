"""How a benchmark prints: a table, or with --json one object; and how --save keeps what it says."""

import argparse
import inspect
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# What a figure may depend on, where it is installed.
DISTRIBUTIONS = (
    "jax jaxlib marin-haliax equinox flax numpy optax mamba2-jax torch transformers".split()
)


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
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the figures into benchmarks/results, from which docs/benchmarks.md is made",
    )
    options = parser.parse_args()
    # Before the long part: the commit must be that of the code that is measured.
    about = about_this_run(Path(inspect.getfile(measure)).stem) if options.save else None
    figures = measure()
    if about is not None:
        save(about, figures)
    if options.json:
        print(json.dumps(figures))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "marin-haliax"))
    table = Table(title=f"{doc.splitlines()[0]}\n{versions}, {platform.machine()}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def about_this_run(script: str) -> dict[str, object]:
    """What a reader of the figures has to know: the command, the commit, the versions, the machine.

    Args:
        script: The name of the benchmark's file, without `.py`.

    Raises:
        SystemExit: The code differs from its last commit, so that no commit names it.
    """
    changed = _git("status", "--porcelain", "--", "stackax", "benchmarks", "tests/reference")
    changed = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    if changed:
        raise SystemExit(
            "\n".join(["commit these first, for a result names its commit:", *changed])
        )
    return {
        "script": script,
        "command": f"python benchmarks/{script}.py --save",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": _versions(),
    }


def save(about: Mapping[str, object], figures: Mapping[str, object]) -> Path:
    """Writes a result, in the place of an older one of the same script and release of JAX.

    Args:
        about: From `about_this_run`.
        figures: The figures by key.

    Returns:
        The file.
    """
    release = ".".join(version("jax").split(".")[:2])
    file = RESULTS / f"{about['script']}.jax-{release}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**about, "figures": figures}, indent=2) + "\n", encoding="utf-8")
    return file


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu_model() -> str:
    """The processor's name, as the system has it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
