"""What the pages point at in the repository is there: tests, benchmarks, files."""

import re
from pathlib import Path

import pytest

PAGES = [*sorted(Path("docs").rglob("*.md")), Path("README.md"), Path("CONTRIBUTING.md")]
FILE = re.compile(r"`(?:python )?((?:tests|benchmarks|stackax|notebooks)/[\w/]+\.\w+)((?:::\w+)?)")
# A second test of a file that was named before.
OF_SAME_FILE = re.compile(r"`::(\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_and_test_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for match in FILE.finditer(text):
        file, test = match[1], match[2].removeprefix("::")
        assert Path(file).is_file(), file
        assert not test or f"def {test}(" in Path(file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("page", sorted(Path("docs/design").glob("*.md")), ids=lambda p: p.stem)
def test_a_second_test_is_in_the_file_named_before_it(page):
    text = page.read_text(encoding="utf-8")
    for match in OF_SAME_FILE.finditer(text):
        files = [found[1] for found in FILE.finditer(text, 0, match.start())]
        assert f"def {match[1]}(" in Path(files[-1]).read_text(encoding="utf-8"), match[1]
