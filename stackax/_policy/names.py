"""Names for a block's internals, and the check that a policy's names mean something."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as _checkpoint_name
from jax.extend.core import Jaxpr, Var, jaxprs_in_params
from jax.extend.core.primitives import name_p

from .._warn import warn_caller
from .policy import ScanCheckpointPolicy, did_you_mean

T = TypeVar("T")

_UNCHECKED = ContextVar("names_unchecked", default=False)
_FOUND: ContextVar[list[frozenset[str]] | None] = ContextVar("names_found", default=None)


def checkpoint_name(x: T, name: str) -> T:
    """Gives every array of `x` a name by which a policy can keep it or send it to the host.

    Naming changes no value. Only a value that the backward pass needs can be kept, so name what
    later operations read (the input of a nonlinearity, the output of a projection).

    Args:
        x: Any pytree; its arrays (those of NamedArrays included), of any shape, are named, the rest
            passes.
        name: The name, the same for all of them.

    Returns:
        `x`, of the same structure, shapes and dtypes.

    Raises:
        TypeError: `name` is not a string, or is empty.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax import checkpoint_name
        >>> checkpoint_name(jnp.ones(3), "query_proj").shape
        (3,)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"checkpoint_name needs a non-empty string for a name, not {name!r}.")
    return jax.tree.map(lambda leaf: _checkpoint_name(leaf, name) if _is_array(leaf) else leaf, x)


class NamesSeen(NamedTuple):
    """The names that occur in a step, and those of them that its backward pass can keep."""

    present: frozenset[str]
    residuals: frozenset[str]


def find_names(step: Callable, args: Any, policy: ScanCheckpointPolicy) -> NamesSeen:
    """Traces `step(*args)` and its derivative once and collects the names in it.

    Args:
        step: A function of pytrees of arrays.
        args: Arrays or `jax.ShapeDtypeStruct`s, one pytree an argument.
        policy: Whose names are asked about.
    """
    wanted = set(policy.saved_names + policy.offloaded_names)
    present: set[str] = set()

    def record(prim, *_, **params) -> bool:
        if prim is name_p:
            present.add(params["name"])
            return params["name"] in wanted
        return False

    leaves, treedef = jax.tree.flatten(args)
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def residuals(leaves):
        def of_inexact(*some):
            some = iter(some)
            filled = [
                next(some) if is_inexact else leaf
                for leaf, is_inexact in zip(leaves, inexact, strict=True)
            ]
            out = jax.tree.leaves(step(*jax.tree.unflatten(treedef, filled)))
            return [leaf for leaf in out if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        some = [leaf for leaf, is_inexact in zip(leaves, inexact, strict=True) if is_inexact]
        return jax.vjp(jax.checkpoint(of_inexact, policy=record), *some)[1]

    jaxpr = jax.make_jaxpr(residuals)(leaves).jaxpr
    if wanted - present:  # there may be names that no policy is asked about, as in a while loop
        present |= _names_within(jax.make_jaxpr(step)(*args).jaxpr)
    kept = {name for var in jaxpr.outvars for name in _names_behind(jaxpr, var)}
    return NamesSeen(frozenset(present), frozenset(kept))


@contextlib.contextmanager
def names_unchecked() -> Iterator[None]:
    """For whoever has just read the names from the blocks: finding them is a trace of its own."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


@contextlib.contextmanager
def names_found() -> Iterator[list[frozenset[str]]]:
    """Lists the names in the blocks of each loop that runs under a policy with names, instead of
    comparing these with them."""
    token = _FOUND.set(found := [])
    try:
        yield found
    finally:
        _FOUND.reset(token)


def has_names_to_check(policy: ScanCheckpointPolicy) -> bool:
    """Whether a loop has to find its block's names, to compare the policy's with them."""
    return policy.has_names and not _UNCHECKED.get()


def check_names(policy: ScanCheckpointPolicy, seen: Iterable[NamesSeen], axis_name: str) -> None:
    """Raises for names that no block carries, warns for those that can have no effect.

    Args:
        policy: Whose names are checked.
        seen: What `find_names` found, for each kind of block.
        axis_name: The axis of the loop, for the message.
    """
    where = f"the block that runs over {axis_name!r}"
    seen = list(seen)
    present = frozenset().union(*(each.present for each in seen))
    if (found := _FOUND.get()) is not None:
        found.append(present)
        return
    residuals = frozenset().union(*(each.residuals for each in seen))
    names = policy.saved_names + policy.offloaded_names
    absent = [name for name in names if name not in present]
    known = f"Its names are {sorted(present)}." if present else "It names no value."
    if policy.match_names == "any" and len(absent) == len(names):
        raise ValueError(
            f"the remat policy's vocabulary is {list(names)}, but {where} names none of them. "
            f"{known} Mark a value with stackax.checkpoint_name(x, {names[0]!r})."
        )
    if policy.match_names == "all" and absent:
        raise ValueError(
            f"the remat policy names {absent[0]!r}, but no value in {where} has that name"
            f"{did_you_mean(absent[0], present)} {known} "
            f"Mark it with stackax.checkpoint_name(x, {absent[0]!r})."
        )
    idle = [name for name in names if name in present and name not in residuals]
    if idle and policy.match_names == "all":
        warn_caller(
            f"the remat policy names {idle}, but the backward pass of {where} never needs "
            "these values, so keeping them has no effect: name the input of an operation whose "
            "derivative reads it."
        )


def _names_within(jaxpr: Jaxpr) -> set[str]:
    names = {eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive is name_p}
    inner = (j for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params))
    return names.union(*(_names_within(j) for j in inner))


# Between a named value and the residual that JAX saves of it stand at most these.
_PASS_THROUGH = frozenset({"device_put", "reduce_precision", "optimization_barrier", "copy"})


def _names_behind(jaxpr: Jaxpr, var: Any) -> set[str]:
    """The name of the value `var`, found through calls and loops that return it."""
    if not isinstance(var, Var):
        return set()
    for eqn in jaxpr.eqns:
        if var not in eqn.outvars:
            continue
        index = eqn.outvars.index(var)
        if eqn.primitive is name_p:
            return {eqn.params["name"]}
        if eqn.primitive.name in _PASS_THROUGH:
            return _names_behind(jaxpr, eqn.invars[index])
        inner = [j for j in jaxprs_in_params(eqn.params) if len(j.outvars) == len(eqn.outvars)]
        return {name for j in inner for name in _names_behind(j, j.outvars[index])}
    return set()


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
