"""What the site's build does beyond Markdown: MkDocs calls these functions by their names."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shows CHANGELOG.md in the place of the changelog's page."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return _with_anchors((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


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
