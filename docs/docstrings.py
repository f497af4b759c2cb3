"""How the house's docstrings become Griffe's: the headings `Example:` and `References:`."""

import re
from typing import Any

import griffe


class HouseSections(griffe.Extension):
    """Has examples typeset as code, and references as a paragraph rather than a box."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object that Griffe has loaded."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _REFERENCES.sub(_as_paragraph, text)


_REFERENCES = re.compile(r"^References:\n((?:    .*\n?)+)", re.MULTILINE)


def _as_paragraph(section: re.Match[str]) -> str:
    return "**References:** " + re.sub(r"^    ", "", section[1], flags=re.MULTILINE)
