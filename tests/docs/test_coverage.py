"""Every public name has one entry, an example, and axes for its arrays; and the check bites."""

import dataclasses
import re
from typing import Any

import haliax
import numpy as np
import pytest
from haliax import NamedArray
from jaxtyping import Array, Float

from stackax import Stacked
from stackax._stack.base import Container
from tests.docs.coverage import PAGES as FOLDER
from tests.docs.coverage import (
    WITHOUT_EXAMPLE,
    entries,
    faults_of,
    faults_of_pages,
    has_example,
    public_names,
    public_packages,
)

PUBLIC = {package: public_names(package) for package in public_packages()}
NAMED = {name: thing for names in PUBLIC.values() for name, thing in names.items()}


def test_every_public_name_has_exactly_one_entry():
    names = {package: list(members) for package, members in PUBLIC.items()}
    assert faults_of_pages(names, entries()) == []


@pytest.mark.parametrize("name", sorted(NAMED))
def test_documentation_has_an_example_and_the_axes_of_arrays(name):
    assert faults_of(name, NAMED[name]) == []


def test_names_without_an_example_are_public_and_have_none():
    assert WITHOUT_EXAMPLE.keys() <= NAMED.keys()
    assert [name for name in WITHOUT_EXAMPLE if has_example(NAMED[name])] == []


def test_the_packages_of_the_reading_order_are_found():
    assert {"stackax", "stackax.memory", "stackax.mamba2"} <= set(PUBLIC)
    assert "stackax.Stacked" in NAMED and "stackax.mamba2.ssd" in NAMED


def test_the_entry_of_stacked_lists_all_its_members():
    page = (FOLDER / "stackax.md").read_text(encoding="utf-8")
    options = page.partition("::: stackax.Stacked\n")[2].partition("\n\n")[0]
    listed = re.findall(r"- (\w+)$", options, re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(Stacked)}
    members = {name for name in dir(Stacked) if not name.startswith("_")} - fields
    inherited = set(dir(haliax.nn.Stacked)) - set(vars(Stacked)) - set(vars(Container))
    assert len(listed) == len(set(listed)) and set(listed) == members - inherited


PAGES = {"stackax": ["stackax", "stackax.fold"], "lm": ["stackax.lm", "stackax.lm.train"]}
NAMES = {"stackax": ["stackax.fold"], "stackax.lm": ["stackax.lm.train"]}


def test_complete_pages_have_no_faults():
    assert faults_of_pages(NAMES, PAGES) == []


@pytest.mark.parametrize(
    "page, found, fault",
    [
        ("lm", ["stackax.lm"], "docs/api/lm.md has no entry `::: stackax.lm.train`"),
        ("lm", ["stackax.lm.train"], "docs/api/lm.md has no entry `::: stackax.lm`"),
        ("stackax", [*PAGES["stackax"], "stackax.fold"], "stackax.fold has 2 entries"),
        ("stackax", [*PAGES["stackax"], "stackax.lm.train"], "stackax.lm.train has 2 entries"),
        ("lm", [*PAGES["lm"], "stackax.lm.gone"], "`::: stackax.lm.gone` is the entry of nothing"),
    ],
)
def test_a_wrong_page_is_found(page, found, fault):
    (said,) = faults_of_pages(NAMES, PAGES | {page: found})
    assert fault in said


def complete(x: NamedArray, weight: Float[Array, "k C"], size: int) -> NamedArray:
    """Does something.

    Args:
        x: The input, with `Embed` and any other axes.
        weight: The taps.
        size: A number.

    Returns:
        An array with the axes of `x`.

    Example:
        >>> 1 + 1
        2
    """
    return x


def without_example(size: int) -> int:
    """Does something.

    Args:
        size: A number.
    """
    return size


def without_axes_of_an_argument(x: NamedArray | None) -> None:
    """Does something.

    Args:
        x: The input of the layer.

    Example:
        >>> 1 + 1
        2
    """


def without_the_argument(x: np.ndarray) -> None:
    """Does something with the shape of `x`.

    Example:
        >>> 1 + 1
        2
    """


def without_axes_of_the_result(size: int) -> tuple[NamedArray, int]:
    """Does something.

    Returns:
        The output of the layer, and a number.

    Example:
        >>> 1 + 1
        2
    """
    raise NotImplementedError


def with_an_empty_reference(x: NamedArray) -> None:
    """Does something.

    Args:
        x: As in `nowhere`.

    Example:
        >>> 1 + 1
        2
    """


def with_a_circular_reference(x: NamedArray) -> None:
    """Does something.

    Args:
        x: As in `with_a_circular_reference`.

    Example:
        >>> 1 + 1
        2
    """


def with_hidden_arrays(tree: Any) -> None:
    """Does something.

    Args:
        tree: A pytree of arrays.

    Example:
        >>> 1 + 1
        2
    """


@dataclasses.dataclass
class WithFields:
    """Holds something.

    Attributes:
        weight: The weights.

    Example:
        >>> 1 + 1
        2
    """

    weight: NamedArray
    size: int


class WithMethods:
    """Does something.

    Example:
        >>> 1 + 1
        2
    """

    def __call__(self, x: NamedArray) -> None:
        """Does something.

        Args:
            x: The input, with `Embed`.
        """

    def step(self, x: NamedArray, mask: NamedArray) -> None:
        """Does something.

        Args:
            x: As in `__call__`.
            mask: As in `__call__`.
        """

    def undocumented(self) -> None: ...


@pytest.mark.parametrize(
    "thing, faults",
    [
        (complete, []),
        (without_example, ["it has no example"]),
        (without_axes_of_an_argument, ["it: `x` is an array"]),
        (without_the_argument, ["it: `x` is an array"]),
        (without_axes_of_the_result, ["it: what it returns is an array"]),
        (with_an_empty_reference, ["it: `x` is an array"]),
        (with_a_circular_reference, ["it: `x` is an array"]),
        (with_hidden_arrays, ["it: `tree` is an array"]),
        (WithFields, ["it: `weight` is an array", "it: field `size` is not described"]),
        (WithMethods, ["it.step: `mask` is an array", "it.undocumented has no docstring"]),
        (7, ["it has no example"]),
    ],
)
def test_a_wrong_docstring_is_found(thing, faults):
    found = faults_of("it", thing)
    assert len(found) == len(faults)
    assert all(said.startswith(fault) for said, fault in zip(found, faults, strict=True))
