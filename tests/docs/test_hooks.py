"""docs/hooks.py: the changelog's anchors, and the links of names that are written as code."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[2] / "docs"

_spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


def page(path):
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def target(html, path="tour.md"):
    """The entry that the first name in the page is linked to, or None."""
    found = re.search(r'identifier="([^"]+)"', hooks.on_page_content(html, page(path)))
    return found and found[1]


def test_every_heading_of_the_changelog_has_an_anchor_of_its_own():
    shown = hooks.on_page_markdown("a stub", page("changelog.md"))
    headings = re.findall(r"^##+ .*$", shown, re.MULTILINE)
    anchors = re.findall(r"^##+ .* \{ #(\S+) \}$", shown, re.MULTILINE)
    assert headings and len(anchors) == len(headings) == len(set(anchors))
    assert "0.1.0" in anchors and "0.1.0-added" in anchors


def test_other_pages_are_left_as_they_are():
    assert hooks.on_page_markdown("# Tour", page("tour.md")) == "# Tour"


@pytest.mark.parametrize(
    "code, path, entry",
    [
        ("stackax.memory.explain", "tour.md", "stackax.memory.explain"),
        ("stackax.Stacked.fold", "tour.md", "stackax.Stacked.fold"),
        ("stackax.mamba2", "tour.md", "stackax.mamba2"),
        ("explain", "tour.md", None),
        ("explain", "api/memory.md", "stackax.memory.explain"),
        ("Stacked.init", "api/lm.md", "stackax.Stacked.init"),
        ("fold", "api/stackax.md", None),  # a method too
        ("haliax.fold", "api/stackax.md", None),
    ],
)
def test_a_public_name_in_code_is_linked_to_its_entry(code, path, entry):
    assert target(f"<p>see <code>{code}</code></p>", path) == entry


@pytest.mark.parametrize(
    "html",
    [
        '<a href="x"><code>{}</code></a>',
        "<h2>On <code>{}</code></h2>",
        "<pre><span></span><code>{}</code></pre>",
        "<li><b><code>{}</code></b> an argument</li>",
    ],
)
def test_links_headings_blocks_and_labels_are_passed_over(html):
    assert target(html.format("stackax.memory.explain")) is None


def test_only_long_names_in_tables_can_be_broken():
    long, short = "<code>kept_bytes_minimal</code>", "<code>slots</code>"
    shown = hooks.on_page_content(f"{long}<table><td>{long} {short}</td></table>", page("tour.md"))
    broken = "<code>kept_<wbr>bytes_<wbr>minimal</code>"
    assert shown == f"{long}<table><td>{broken} {short}</td></table>"


def test_shapes_of_one_axis_are_shown_without_the_space_for_linters():
    one, two = "<b>Array</b><i>,</i> <u>&quot; H&quot;</u>", "<b>Array</b>, &#39;H P&#39;"
    shown = hooks.on_page_content(one + two, page("api/mamba2.md"))
    assert shown == one.replace(" H", "H") + two
