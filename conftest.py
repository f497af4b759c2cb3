"""How everything runs under pytest: eight devices, a compilation cache, and every written example.

The code blocks of README.md and docs/ are tests, and so are the `>>>` examples of docstrings. A
page is one program: its blocks share their names. A docstring stands alone, as its reader pastes
it: nothing is imported for it, neither by its module nor by the docstring above it.
"""

import getpass
import os
import tempfile
from bisect import bisect
from collections.abc import Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from pathlib import Path

from sybil import Document, Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

# In the environment, before jax is imported, so that the processes that tests start have it too.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"stackax-compilation-cache-{getpass.getuser()}"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


class _StandaloneDocstrings(PythonDocStringDocument):
    """The docstrings of one file, each evaluated in a namespace of its own."""

    def __init__(self, text: str, path: str) -> None:
        Document.__init__(self, text, path)  # the parent's would lend the module's own names

    def examples(self) -> Iterator[Example]:
        """Yields the file's examples, with a fresh namespace where a docstring begins."""
        starts = sorted(start for start, _, _ in self.extract_docstrings(self.text))
        namespaces = [{"__name__": "__main__"} for _ in starts]
        for example in super().examples():
            example.namespace = namespaces[bisect(starts, example.start) - 1]
            yield example


_FLAGS = ELLIPSIS | NORMALIZE_WHITESPACE


def _as_a_program(namespace: dict) -> None:
    namespace["__name__"] = "__main__"


_pages = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=_FLAGS), SkipParser()],
    patterns=["*.md"],
    setup=_as_a_program,
)
_docstrings = Sybil(
    parsers=[DocTestParser(optionflags=_FLAGS)],
    path="stackax",
    patterns=["*.py"],
    document_types={".py": _StandaloneDocstrings},
)
pytest_collect_file = (_pages + _docstrings).pytest()
