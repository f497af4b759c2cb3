"""Renders benchmarks/results into the tables of docs/: `python benchmarks/render.py`.

docs/benchmarks.md has every figure, docs/choosing_a_policy.md those of the policies, one a row.

What a figure means comes from its script's docstring, so a figure that a script no longer has, or
has no word for, is an error here. Whether more of it is better stands in `BETTER`.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
POLICIES_PAGE = ROOT / "docs" / "choosing_a_policy.md"
BEGIN, END = "<!-- made by benchmarks/render.py -->", "<!-- end of what it made -->"

# For each script, in the page's order: which figures are better when they are higher, lower, or
# true. The others (a count of cases, what a rule left out costs) are neither good nor bad.
BETTER: Mapping[str, Mapping[str, str]] = {
    "stack_memory": {
        "higher": "haliax_nested_over_ours_n64 haliax_nested_over_ours_transformer_n64",
        "lower": (
            "no_remat_over_lax_scan simple_over_lax_scan transformer_slots16_over_simple_n97 "
            "mlp_slots16_over_simple_n97 nested_over_simple_max carries_per_slot_min "
            "carries_per_slot_max constant_n128_over_n17 hlo_n128_over_n17"
        ),
        "yes": "evaluations_equal_optimum",
    },
    "stack_compile": {
        "lower": (
            "grad_compile_n96_over_n8 run_over_lax_scan slots12_step_over_simple "
            "slots64_step_over_simple nested_step_over_simple slots_compile_over_simple"
        ),
    },
    # Each has its price, so that none is better than another.
    "policies": {},
    "estimate_accuracy": {
        "higher": "within_10_percent in_band held_out_within_10_percent held_out_in_band",
        "lower": (
            "worst_under_percent worst_over_percent milliseconds held_out_worst_under_percent "
            "held_out_worst_over_percent held_out_milliseconds"
        ),
    },
    "plan_quality": {
        "higher": "fit",
        "lower": "worst_flops_over_best seconds_8_names",
        "yes": "monotonic",
    },
    "streaming": {
        "lower": (
            "all_gathers_forward_over_n all_gathers_training_over_n live_layers "
            "live_layers_training peak_n32_over_n4 peak_n32_over_n4_training copies_of_a_layer "
            "max_error"
        ),
    },
    "ssd": {
        "higher": (
            "forward_speedup forward_speedup_vs_best_chunk step_speedup step_speedup_vs_best_chunk "
            "temp_ratio temp_ratio_vs_best_chunk forward_temp_ratio "
            "forward_temp_ratio_vs_best_chunk"
        ),
    },
    "mamba2_model": {
        "higher": (
            "prefill_speedup train_speedup policy_temp_ratio train_temp_ratio decode_speedup "
            "decode_speedup_vs_best_chunk cached_speedup_4096 decode_speedup_vs_torch "
            "temp_ratio_24 compile_ratio_24"
        ),
        "lower": "logits_difference decode_4096_over_64 compile_24_over_4",
    },
    "mamba2_ablations": {
        "lower": (
            "gradient_error norm_error_float32 default_precision_error residual_error_float32"
        ),
    },
}


def main() -> None:
    """Writes the pages; with --check only says whether they are up to date."""
    for page in (PAGE, POLICIES_PAGE):
        old = page.read_text(encoding="utf-8")
        new = rendered(old, policies_table if page == POLICIES_PAGE else tables)
        if "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
        elif new != old:
            sys.exit(f"{page} is not what benchmarks/results renders to")


def rendered(page: str, make: Callable[[], str] | None = None) -> str:
    """The page, with what is between the two marks made anew.

    Args:
        page: Its text.
        make: What makes it; `tables` if not given.

    Returns:
        Its text as it should be.
    """
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{(make or tables)()}\n\n{END}{after}"


def policies_table() -> str:
    """The newest result of policies.py, a row for each policy."""
    result = read_results()["policies"][-1]
    figures = result["figures"]
    rows = [
        "| `remat=` | kept, MiB | temp, MiB | passes | repeated | time |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy in policies_of(figures):
        kept, temp = (figures[f"{kind}_bytes_{policy}"] / 2**20 for kind in ("kept", "temp"))
        passes, share, seconds = (
            figures[f"{kind}_{policy}"]
            for kind in ("forward_evaluations", "recomputed_share", "relative_time")
        )
        rows.append(
            f'| `"{policy}"` | {kept:.1f} | {temp:.1f} | {passes:.2f} | {share:.0%} '
            f"| {seconds:.2f} |"
        )
    return "\n".join([*rows, "", f"Made by `{result['command']}`:", "", _about(result)])


def policies_of(figures: Mapping[str, Any]) -> list[str]:
    """The policies that figures of policies.py are about, in their order."""
    return [key.removeprefix("kept_bytes_") for key in figures if key.startswith("kept_bytes_")]


def tables() -> str:
    """A section for each script that has results, and the names of those that have none."""
    results = read_results()
    scripts = [*BETTER, *sorted(set(results) - set(BETTER))]
    sections = [section(script, results[script]) for script in scripts if script in results]
    missing = [f"`{script}.py`" for script in measuring_scripts() if script not in results]
    if missing:
        sections.append(f"No result is kept of {', '.join(missing)}.")
    return "\n\n".join(sections)


def read_results() -> dict[str, list[dict[str, Any]]]:
    """The results by script, those of the oldest JAX first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(result["script"], []).append(result)
    for results in found.values():
        results.sort(key=lambda result: _numbers(result["versions"]["jax"]))
    return found


def measuring_scripts() -> list[str]:
    """The benchmarks that print figures."""
    files = sorted(BENCHMARKS.glob("*.py"))
    calls_run = re.compile(r"^    run\(__doc__, ", re.MULTILINE)
    return [f.stem for f in files if calls_run.search(f.read_text(encoding="utf-8"))]


def section(script: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A script's question, its table, and how the table came about.

    Raises:
        ValueError: A figure has no meaning in the script's docstring, the docstring tells of a
            figure that no result has, or `BETTER` does not know the script.
    """
    title, prose, meanings = read_docstring(script)
    keys = list(dict.fromkeys(key for result in results for key in result["figures"]))
    for key in meanings:
        has_figure = any(k == key or k.startswith(f"{key}_") for k in keys)
        if not key.endswith("...") and not has_figure:
            raise ValueError(f"{script}.py tells of {key}, but no result has it: run it again")
    heads = [f"jax {_release(result)}" for result in results]
    # What a phone shows without scrolling comes first.
    rows = ["| figure | " + " | ".join(heads) + " | better | meaning |"]
    rows.append("|---|" + "---:|" * len(heads) + "---|---|")
    for key in sorted(keys, key=lambda key: _place(key, list(meanings))):
        values = [show(result["figures"].get(key)) for result in results]
        told = f"{better(script, key)} | {meaning_of(key, meanings, script)}"
        rows.append(f"| `{key}` | {' | '.join(values)} | {told} |")
    notes = [_about(result) for result in results]
    command = f"`{results[-1]['command']}`"
    return "\n\n".join(
        [f"## {script}.py", title, *prose, "\n".join(rows), f"Made by {command}:", "\n".join(notes)]
    )


def read_docstring(script: str) -> tuple[str, list[str], dict[str, str]]:
    """A benchmark's question, what else its docstring says, and what each figure means.

    Args:
        script: Its name, without `.py`.

    Returns:
        The first line, the other paragraphs of prose, and the meanings by key.
    """
    source = (BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")
    title, *paragraphs = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
    prose, meanings = [], {}
    for paragraph in paragraphs:
        lines = [re.fullmatch(r"(\w\S*(?:, _\w+)*)\s{2,}(.+)", x) for x in paragraph.splitlines()]
        if None in lines:
            prose.append(paragraph)
            continue
        for line in lines:
            assert line is not None
            first, *suffixes = line[1].split(", ")
            stem = first.rpartition("_")[0]
            for key in (first, *(stem + suffix for suffix in suffixes)):
                meanings[key] = line[2]
    return title, prose, meanings


def meaning_of(key: str, meanings: Mapping[str, str], script: str) -> str:
    """What a figure means: its own line, or that of the figure that it is a variant of.

    Raises:
        ValueError: There is neither.
    """
    if key in meanings:
        return meanings[key]
    for known, meaning in meanings.items():
        if known.endswith("...") and key.startswith(known[:-3]):
            return f"{meaning_of(key.removeprefix(known[:-3]), meanings, script)}: {meaning}"
        if key.startswith(f"{known}_"):
            return f"{meaning} ({key.removeprefix(known + '_').replace('_', ' ')})"
    raise ValueError(f"{script}.py has no word for {key}: run it again, or write its line")


def _place(key: str, known: Sequence[str]) -> tuple[int, bool]:
    """Where a figure stands: in the docstring's order, variants after what they vary."""
    if key in known:
        return known.index(key), False
    bases = [i for i, base in enumerate(known) if key.startswith(f"{base}_")]
    return max(bases, key=lambda i: len(known[i]), default=len(known)), True


def better(script: str, key: str) -> str:
    """Which direction is good: "higher", "lower", "yes", or nothing.

    Raises:
        ValueError: Nobody has said yet.
    """
    if script not in BETTER:
        raise ValueError(f"say in BETTER of benchmarks/render.py what is better in {script}.py")
    return next((how for how, keys in BETTER[script].items() if key in keys.split()), "")


def show(value: Any) -> str:
    """A figure, as a table has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _about(result: Mapping[str, Any]) -> str:
    versions = [f"{name} {number}" for name, number in result["versions"].items()]
    return (
        f"- commit `{result['commit']}`, on {result['machine']}, Python {result['python']}, "
        + ", ".join(versions)
    )


def _release(result: Mapping[str, Any]) -> str:
    return ".".join(result["versions"]["jax"].split(".")[:2])


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


if __name__ == "__main__":
    main()
