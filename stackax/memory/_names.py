"""The names in a program, and those that stand in a recomputation."""

from collections.abc import Iterator

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import name_p

from .. import _jax
from .._loop.scopes import REMATTED
from ._walk import inner_jaxprs


def names_in(jaxpr: Jaxpr) -> frozenset[str]:
    """Every `checkpoint_name`."""
    return frozenset(name for name, _ in _names(jaxpr, is_again=False))


def names_computed_again(jaxpr: Jaxpr) -> frozenset[str]:
    """Those of values that a backward pass computes for the second time."""
    return frozenset(name for name, is_again in _names(jaxpr, is_again=False) if is_again)


def _names(jaxpr: Jaxpr, is_again: bool) -> Iterator[tuple[str, bool]]:
    for eqn in jaxpr.eqns:
        within = is_again or REMATTED in _jax.name_stack(eqn)
        if eqn.primitive is name_p:
            yield eqn.params["name"], within
        for inner in inner_jaxprs(eqn):
            yield from _names(inner, within)
