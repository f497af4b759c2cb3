"""The notebooks as they are committed: pairs of a script and its executed outputs.

That they run is checked by `pytest --nbmake notebooks`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STEMS = sorted({path.stem for path in NOTEBOOKS.glob("*.*")})

# Folders of a machine, and addresses in its memory.
OF_A_MACHINE = re.compile(
    r"(?<![\w.])/(home|root|Users|opt|tmp|usr|var|mnt|work)/|[A-Z]:\\|site-packages|\b0x[0-9a-f]{6}"
)


@pytest.fixture(params=STEMS)
def stem(request):
    return request.param


@pytest.fixture
def notebook(stem):
    return jupytext.read(NOTEBOOKS / f"{stem}.ipynb")


def as_script(path):
    """A notebook as a percent script, without the version of jupytext that wrote it."""
    script = jupytext.writes(jupytext.read(path), fmt="py:percent")
    return re.sub(r"^# +jupytext_version: .*\n", "", script, flags=re.MULTILINE)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def calls_of(cell) -> Iterator[str]:
    """What a cell calls when it runs, and the last line's name where it is one."""
    source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
    own = [s for s in ast.parse(source).body if not isinstance(s, ast.FunctionDef | ast.ClassDef)]
    for node in (node for statement in own for node in ast.walk(statement)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
    if own and isinstance(own[-1], ast.Expr) and isinstance(own[-1].value, ast.Name):
        yield "display"


def shows(cell) -> bool:
    return any(name in ("print", "display") or is_picture(name) for name in calls_of(cell))


def is_picture(name: str) -> bool:
    return name == "plt.show" or name.startswith("plot_")


def texts_of(cell) -> Iterator[str]:
    """What a cell says, pictures left out: its source, and what it printed and displayed."""
    yield cell.source
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield data


def test_the_outputs_are_those_of_the_script(stem):
    executed, script = (as_script(NOTEBOOKS / f"{stem}{kind}") for kind in (".ipynb", ".py"))
    assert executed == script, f"edit {stem}.py, then: jupytext --to ipynb --execute {stem}.py"


def test_cells_ran_in_order_and_without_a_word_on_stderr(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr", output


def test_cells_that_print_or_draw_have_it_in_their_outputs(notebook):
    for cell in filter(shows, code_cells(notebook)):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert cell.outputs, cell.source
        assert "image/png" in kinds or not any(map(is_picture, calls_of(cell))), cell.source


def test_nothing_tells_which_machine_it_ran_on(notebook):
    for text in (text for cell in notebook.cells for text in texts_of(cell)):
        assert not OF_A_MACHINE.search(text), text


def test_it_opens_with_a_question_and_ends_with_what_to_remember(notebook):
    first, last = notebook.cells[0], notebook.cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    title, remember = first.source.splitlines()[0], last.source.splitlines()
    assert title.startswith("# ") and title.endswith("?")
    assert remember[0] == "## What to remember" and remember[2].startswith("- ")
