"""Assertions on the memory bill of a function, made from its trace."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._policy.policy import RematSpec
from ..memory import Report, explain, parse_bytes, show_bytes


def assert_saves(
    fn_or_stack: Any,
    *args_and_expected: Any,
    max_bytes: int | str | None = None,
    remat: RematSpec | None = None,
    argnums: int | Sequence[int] | None = None,
) -> None:
    """Asserts that the backward pass keeps the named values, and no more than so many bytes.

    Args:
        fn_or_stack: As in `stackax.memory.explain`.
        *args_and_expected: What it is called with; then, last, a mapping from each name that is to
            be kept to its bytes in all layers together (a number, or a text such as `"64MiB"`), or
            to None where any number will do. Other names must not be kept.
        max_bytes: The most that may be kept in all beside the arguments, on device and host, named
            or not. None means any number.
        remat: As in `stackax.memory.explain`.
        argnums: As in `stackax.memory.explain`.

    Raises:
        AssertionError: Something else is kept; the message has the whole bill.
        TypeError: The last argument is no mapping, or as `stackax.memory.explain`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax import checkpoint_name
        >>> from stackax.testing import assert_saves
        >>> def f(x):
        ...     y = checkpoint_name(jnp.exp(x), "exp")
        ...     return (y * y).sum()
        >>> assert_saves(f, jnp.ones(4), {"exp": 16}, max_bytes=32)
    """
    *args, expected = args_and_expected or (None,)
    if not isinstance(expected, Mapping):
        raise TypeError(
            "assert_saves takes the names to be kept last, after the function's arguments, as in "
            f"assert_saves(f, x, {{'query_proj': 4096}}), not a {type(expected).__name__}"
        )
    report = explain(fn_or_stack, *args, remat=remat, argnums=argnums)
    kept = Counter()
    for residual in report.residuals:
        if residual.name is not None and residual.kind != "argument":
            kept[residual.name] += residual.bytes
    faults = [
        f"{name!r} is not kept, but was to be: {_where(report, name)}"
        for name in expected
        if name not in kept
    ]
    for name, size in kept.items():
        if name not in expected:
            faults.append(f"{name!r} is kept ({show_bytes(size)}), but was not to be")
        elif expected[name] is not None and size != parse_bytes(expected[name]):
            faults.append(f"{name!r} takes {size} bytes, not {parse_bytes(expected[name])}")
    total = report.kept_bytes + report.offloaded_bytes
    if max_bytes is not None and total > parse_bytes(max_bytes):
        faults.append(f"{total} bytes are kept in all, more than max_bytes={max_bytes}")
    _fail(faults, report)


def assert_recomputes(
    fn_or_stack: Any,
    *args_and_expected: Any,
    max_forward_evaluations: float | None = None,
    remat: RematSpec | None = None,
    argnums: int | Sequence[int] | None = None,
) -> None:
    """Asserts that the backward pass computes the named values again.

    Args:
        fn_or_stack: As in `stackax.memory.explain`.
        *args_and_expected: What it is called with; then, last, the names (a collection of them, or
            one). Other names may be computed again as well.
        max_forward_evaluations: The most that the forward pass may be run, all operations
            together: 1 is no recomputation, 2 all of it once more. None means any number.
        remat: As in `stackax.memory.explain`.
        argnums: As in `stackax.memory.explain`.

    Raises:
        AssertionError: A value is not computed again, or too much is; the message has the whole
            bill.
        TypeError: The last argument is no collection of names, or as `stackax.memory.explain`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax import checkpoint_name
        >>> from stackax.testing import assert_recomputes
        >>> @jax.checkpoint
        ... def f(x):
        ...     return jnp.sin(checkpoint_name(jnp.exp(x), "exp")).sum()
        >>> assert_recomputes(f, jnp.ones(4), ["exp"], max_forward_evaluations=2)
    """
    *args, expected = args_and_expected or (None,)
    names = [expected] if isinstance(expected, str) else expected
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "assert_recomputes takes the names last, after the function's arguments, as in "
            f"assert_recomputes(f, x, ['context']), not {expected!r}"
        )
    report = explain(fn_or_stack, *args, remat=remat, argnums=argnums)
    faults = [
        f"{name!r} is not computed again: {_where(report, name)}"
        for name in names
        if name not in report.recomputed_names
    ]
    evaluations = report.forward_evaluations
    if max_forward_evaluations is not None and evaluations > max_forward_evaluations:
        faults.append(
            f"the forward pass runs {evaluations:.3f} times, more than "
            f"max_forward_evaluations={max_forward_evaluations}"
        )
    _fail(faults, report)


def _where(report: Report, name: str) -> str:
    if any(residual.name == name for residual in report.residuals):
        return "it is kept"
    if name in report.recomputed_names:
        return "it is computed again"
    if name in report.names:
        return "the backward pass does not need it"
    return f"no value has that name; the names are {sorted(report.names)}"


def _fail(faults: list[str], report: Report) -> None:
    if faults:
        raise AssertionError("\n".join([*faults, "", str(report)]))
