"""What a scheduled loop computes cannot be differentiated in reverse mode, and says so."""

from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .step import Arrays


def first_order(arrays: Arrays) -> Arrays:
    """The same arrays, which cannot be differentiated in reverse mode.

    Loops whose number of trips is data cannot; this makes sure that the caller meets a message
    about the policy before JAX meets such a loop.
    """
    return [first_order_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays]


first_order_p = Primitive("scheduled_loop_first_order")
first_order_p.def_impl(lambda x: x)
first_order_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(first_order_p, lambda _, x: [x])
batching.primitive_batchers[first_order_p] = lambda xs, dims: (first_order_p.bind(*xs), *dims)


def refuse_reverse(*_: Any, **__: Any) -> NoReturn:
    """A transpose rule that names the policies that can."""
    raise ValueError(
        "a loop with nested or slots owns its backward pass, so reverse mode cannot be applied to "
        "its derivatives. Use remat=True (simple remat) for reverse over reverse; forward over "
        "reverse (jax.jvp of jax.grad, jax.hessian) works with this policy."
    )


ad.deflinear2(first_order_p, refuse_reverse)
