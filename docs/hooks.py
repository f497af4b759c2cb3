"""What the site's build does beyond Markdown: MkDocs calls these functions by their names."""

import functools as ft
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Public names that docstrings also use for a method, a field or an argument.
AMBIGUOUS = frozenset({"scan", "fold", "map", "plan", "train", "stackax"})


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shows CHANGELOG.md in the place of the changelog's page."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return _with_anchors((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links what is written as code and is a public name to its entry in the API reference.

    A name with its package is linked on every page, a bare one on the pages of the reference.
    mkdocs-autorefs fills in the links, and leaves those to a member without an entry out.
    """
    entries = _entries()
    if page.file.src_uri.startswith("api/"):
        entries, html = _bare(entries) | entries, _SINGLE_AXIS.sub(r"\1", html)

    def linked(match: re.Match[str]) -> str:
        name, member = match["name"], match["member"] or ""
        if name is None or name not in entries:
            return match[0]
        target = f'identifier="{entries[name]}{member}"'
        return f"<autoref optional {target}><code>{name}{member}</code></autoref>"

    return _CELL.sub(_breakable, _CODE_OR_LINK.sub(linked, html))


def _breakable(cell: re.Match[str]) -> str:
    """A cell of a table whose long names can be broken behind their underscores and dots."""
    return _LONG_NAME.sub(lambda name: re.sub(r"([_.])(?=\w)", r"\1<wbr>", name[0]), cell[0])


# `Float[Array, " H"]`, whose space is there for linters alone.
_SINGLE_AXIS = re.compile(r"""(Array</\w+>(?:<[^>]*>|[,\s])*(?:&quot;|&\#39;|["'])) (?=\w)""")

_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_LONG_NAME = re.compile(r"(?<=<code>)[\w.]{16,}(?=</code>)")

# Code in running text; or, to pass it over, what is a link already, a heading, a block, a label.
_CODE_OR_LINK = re.compile(
    r"<code>(?P<name>[\w.]*?\w)(?P<member>\.\w+)?</code>"
    r"|<(?P<tag>a|autoref|pre|h\d|b|summary)\b.*?</(?P=tag)>",
    re.DOTALL,
)


@ft.cache
def _entries() -> dict[str, str]:
    """Each public name that has an entry, by itself."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    found = [re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE) for page in pages]
    return {name: name for names in found for name in names}


def _bare(entries: dict[str, str]) -> dict[str, str]:
    """The same by the last part of the name."""
    bare = {name.rpartition(".")[2]: name for name in entries}
    return {name: entry for name, entry in bare.items() if name not in AMBIGUOUS}


def _with_anchors(changelog: str) -> str:
    """The text, each release's headings with anchors such as `0.1.0` and `0.1.0-added`."""
    lines, release = [], ""
    for line in changelog.splitlines():
        if heading := re.fullmatch(r"## \[(.+)\].*", line):
            release = heading[1].lower()
            line += f" {{ #{release} }}"
        elif heading := re.fullmatch(r"### (\w+)", line):
            line += f" {{ #{release}-{heading[1].lower()} }}"
        lines.append(line)
    return "\n".join(lines)
