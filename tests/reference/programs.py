"""Looking at programs: run many in one compilation, count what they do, weigh what they hold."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Machine code that is not optimised is made in half the time; the program that XLA has optimised
# before, its plan of memory and what it computes are the same.
_QUICKLY = {"xla_backend_optimization_level": 0}


def run_together(programs: dict[Any, Callable], *args) -> dict[Any, Any]:
    """Traces each program on its own, then compiles and runs all of them as one.

    Compiling a tiny gradient costs half a second wherever it stands; eight at once cost one.

    Args:
        programs: functions of `args`, by name; a name is anything hashable.
        args: pytrees of arrays.

    Returns:
        By name: the program's result, or the exception that tracing it raised.
    """
    results, traced = {}, {}
    for name, program in programs.items():
        try:
            traced[name] = jax.make_jaxpr(program, return_shape=True)(*args)
        except Exception as error:  # noqa: BLE001 - it belongs to the one test that asks for it.
            results[name] = error
    functions = [core.jaxpr_as_fun(jaxpr) for jaxpr, _ in traced.values()]
    run = jax.jit(lambda leaves: [f(*leaves) for f in functions], compiler_options=_QUICKLY)
    flat = run(jax.tree.leaves(args))
    for (name, (_, shape)), leaves in zip(traced.items(), flat, strict=True):
        results[name] = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    return results


def take(results: dict[str, Any], name: str) -> Any:
    """The result of one program of `run_together`; raises what tracing it raised."""
    if isinstance(results[name], Exception):
        raise results[name]
    return results[name]


def relative_error(actual, expected) -> float:
    """The largest difference between two equal trees, leaf by leaf, over the leaf's largest."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    errors = [0.0]
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype == jax.dtypes.float0 or a.size == 0:
            continue
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        a, b = np.asarray(a, wide), np.asarray(b, wide)
        assert np.all(np.isfinite(a))
        errors.append(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    return max(errors)


def plain(tree):
    """A tree with its typed keys as integers, so that everything in it is a number."""

    def open_key(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(open_key, tree)


def compile_gradient(loss: Callable, *args):
    """The jitted, undonated value_and_grad of a loss for its first argument, compiled."""
    return jax.jit(jax.value_and_grad(loss)).lower(*args).compile(compiler_options=_QUICKLY)


def temp_bytes(loss: Callable, *args) -> int:
    """The bytes that XLA plans for temporaries of the jitted value_and_grad."""
    return compile_gradient(loss, *args).memory_analysis().temp_size_in_bytes


def count_dots(text: str) -> int:
    """The dot products in a compiled program's text."""
    return len(re.findall(r"\bdot\(", text))


def equations(jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr, inner jaxprs included."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, core.Jaxpr)
        ):
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                yield from equations(value)


def host_shapes(jaxpr) -> set[tuple[int, ...]]:
    """The shapes of all values that a jaxpr places in host memory."""
    return {
        var.aval.shape
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if "<host>" in str(var.aval)
    }


def residual_shapes(f: Callable, *args) -> list[tuple[int, ...]]:
    """The shapes of all values that the backward pass of `f` is handed, sorted."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pullback))


def residual_bytes(f: Callable, *args) -> int:
    """The bytes of all values that the backward pass of `f` is handed, inputs included."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
