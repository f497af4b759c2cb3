"""What is public, and what its documentation lacks: a page, an example, or the axes of its arrays.

A callable that takes or returns arrays says what axes or what shape they have: in the annotation
(jaxtyping's) or in the argument's own words. Words count if they speak of axes, shapes or scalars,
if they name an axis of the library's vocabulary or of the signature, as in `Embed`, or if they
refer to an argument of the same name that does, as in "As in `attend`".
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import stackax
from stackax.mamba2 import Mamba2Config
from stackax.transformer import TransformerConfig

PAGES = Path(__file__).parents[2] / "docs" / "api"

# What needs no example of its own, and why.
WITHOUT_EXAMPLE = {
    "stackax.lm.FILE_START": "a number; the text of `corpus_of` says where it stands",
    **dict.fromkeys(
        (f"stackax.memory.{name}" for name in "Argument Residual Finding Peak Moment".split()),
        "a record within a `Report`, whose `explain` has an example",
    ),
    "stackax.memory.Plan": "a record that only `plan` makes, whose example has one",
    "stackax.memory.Point": "a record that only `plan` makes, within a `Plan`",
}

AXES = frozenset(
    name
    for config in (TransformerConfig, Mamba2Config)
    for name, member in vars(config).items()
    if isinstance(member, property) and name[0].isupper()
)
WORDS = re.compile(r"\b(axis|axes|shapes?|scalars?|dimensions?)\b")
ARRAYS = re.compile(r"\b(NamedArray|ndarray|jax\.Array)\b")
ANYTHING = re.compile(r"^(typing\.)?Any$|^[~+-]\w+$")


def public_packages() -> list[str]:
    """Every importable path without an underscore."""
    below = pkgutil.walk_packages(stackax.__path__, "stackax.")
    return ["stackax", *(found.name for found in below if "._" not in found.name)]


def public_names(package: str) -> dict[str, Any]:
    """What a package offers beside other packages, by full name."""
    members = vars(importlib.import_module(package)).items()
    return {
        f"{package}.{name}": member
        for name, member in members
        if not name.startswith("_") and not inspect.ismodule(member)
    }


def entries(pages: Path = PAGES) -> dict[str, list[str]]:
    """The names that each page has an entry for."""
    return {
        page.stem: re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in sorted(pages.glob("*.md"))
    }


def faults_of_pages(names: Mapping[str, list[str]], pages: Mapping[str, list[str]]) -> list[str]:
    """What is wrong with the entries.

    Args:
        names: The public names of each public package.
        pages: The entries of each page, by its file's name.

    Returns:
        A line for each fault.
    """
    count = Counter(entry for found in pages.values() for entry in found)
    faults = [f"{name} has {times} entries" for name, times in count.items() if times > 1]
    for package, members in names.items():
        page = package.rpartition(".")[2]
        for name in [package, *members]:
            if name not in pages.get(page, []):
                faults.append(f"docs/api/{page}.md has no entry `::: {name}`")
    known = {name for package, members in names.items() for name in [package, *members]}
    for entry in count:
        if "._" not in entry and entry not in known:
            faults.append(f"`::: {entry}` is the entry of nothing public")
    return faults


def faults_of(name: str, thing: Any) -> list[str]:
    """What the documentation of a public thing lacks, a line each."""
    faults = [] if name in WITHOUT_EXAMPLE or has_example(thing) else [f"{name} has no example"]
    for path, part, owner in _parts(name, thing):
        if not inspect.getdoc(part):
            faults.append(f"{path} has no docstring")
        else:
            faults += [f"{path}: {fault}" for fault in _faults_of_arrays(part, owner)]
            if inspect.isclass(part):
                undescribed = [field for field in _annotations(part) if not _words(part, field)]
                faults += [f"{path}: field `{field}` is not described" for field in undescribed]
    return faults


def has_example(thing: Any) -> bool:
    """Whether its docstring, or for a class that of its `init`, has an example."""
    documented = [thing, getattr(thing, "init", None)] if inspect.isclass(thing) else [thing]
    if not callable(thing):
        return False  # the docstring of a value is that of its type
    return any(">>> " in (inspect.getdoc(part) or "") for part in documented)


def _parts(name: str, thing: Any) -> Iterator[tuple[str, Any, type | None]]:
    """A thing and its public members, each with its path and its class."""
    if not callable(thing):
        return
    yield name, thing, None
    if inspect.isclass(thing):
        for member in dir(thing):
            if member == "__call__" or not member.startswith("_"):
                part = getattr(thing, member)
                part = part.fget if isinstance(part, property) else part
                if inspect.isfunction(inspect.unwrap(part)) or inspect.ismethod(part):
                    yield f"{name}.{member}", part, thing


def _faults_of_arrays(part: Any, owner: type | None) -> Iterator[str]:
    for argument, annotation in _annotations(part).items():
        words = _words(part, argument)
        if not _tells_axes(part, argument, owner):
            what = "what it returns" if argument == "return" else f"`{argument}`"
            yield (
                f"{what} is an array ({annotation}), and nothing says of which axes or shape: "
                f"{words!r}"
            )


def _annotations(part: Any) -> dict[str, str]:
    """The annotations of arguments, of fields and of the result, as text."""
    if inspect.isclass(part):
        if dataclasses.is_dataclass(part):
            found = {field.name: field.type for field in dataclasses.fields(part)}
        else:
            found = typing.get_type_hints(part) if issubclass(part, tuple) else {}
    else:
        signature = inspect.signature(part)
        found = {key: value.annotation for key, value in signature.parameters.items()}
        found["return"] = signature.return_annotation
    return {
        key: value if isinstance(value, str) else inspect.formatannotation(value)
        for key, value in found.items()
        if not key.startswith("_") and value is not inspect.Parameter.empty
    }


def _tells_axes(part: Any, argument: str, owner: type | None, seen: tuple = ()) -> bool:
    """Whether an argument is no array, or its axes or its shape are told."""
    annotation, words = _annotations(part).get(argument), _words(part, argument)
    if annotation is None or part in seen:
        return False
    hides_arrays = ANYTHING.search(annotation) and re.search(r"[Aa]rrays?\b", words)
    if not ARRAYS.search(annotation) and not hides_arrays:
        return True
    axes = AXES | {key for key in _annotations(part) if key[0].isupper()}
    if WORDS.search(words) or any(name in axes for name in re.findall(r"`(\w+)`", words)):
        return True
    others = re.findall(r"\b[Aa]s (?:in |those of |that of )?`(?:[\w.]+\.)?(\w+)`", words)
    return any(
        _tells_axes(other, argument, owner, (*seen, part))
        for other in (_find(name, part, owner) for name in others)
        if other is not None
    )


def _find(name: str, part: Any, owner: type | None) -> Any:
    """What a docstring of `part` means by a name: a method of its class, or what is beside it."""
    package = importlib.import_module(part.__module__.partition("._")[0])
    found = getattr(owner, name, None) or getattr(package, name, None)
    return getattr(found, "__call__") if inspect.isclass(found) else found  # noqa: B004


def _words(part: Any, argument: str) -> str:
    """What a docstring says of an argument, a field or, by the name `return`, of the result."""
    sections = sections_of(inspect.getdoc(part) or "")
    if argument == "return":
        return " ".join(sections.get("Returns", []) + sections.get("Yields", []))
    lines = sections.get("Args", []) + sections.get("Attributes", [])
    items = re.split(r"\n(?=\S)", "\n".join(lines))
    for item in items:
        names, _, words = item.partition(":")
        if argument in names.replace("*", "").split(", "):
            return " ".join(words.split())
    return ""


def sections_of(docstring: str) -> dict[str, list[str]]:
    """The lines under each of Google's headings, without their first indentation."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in docstring.splitlines():
        if heading := re.fullmatch(r"([A-Z]\w+):", line):
            lines = sections.setdefault(heading[1], [])
        elif line.startswith("    "):
            lines.append(line[4:])
        elif line:
            lines = []
    return sections
