"""The one place that touches private or version-dependent JAX."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax.extend.core import Jaxpr, unmapped_aval

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def nothing_is_being_traced() -> bool:
    """Whether the caller runs eagerly, under no transformation."""
    return _core.trace_state_clean()


def barrier_survives_compilation() -> bool:
    """Whether XLA keeps `optimization_barrier`, on which remat outside a loop depends.

    The CPU compiler of jax 0.10 removes the barrier before it merges common subexpressions.
    """
    return jax.default_backend() != "cpu" or JAX_VERSION >= (0, 12)


def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of `jaxpr`, with values for what it closes over."""
    return _core.eval_jaxpr(jaxpr, list(consts), *args)


def stacked_aval(size: int, aval: Any) -> Any:
    """The type of `size` values of type `aval` along a new first axis, unsharded there."""
    return unmapped_aval(size, 0, aval)


def stacked_zeros(size: int, aval: Any) -> jax.Array:
    """Zeros of the type that `stacked_aval` gives."""
    stacked = stacked_aval(size, aval)
    zeros = jax.lax.full(stacked.shape, 0, stacked.dtype, sharding=explicit_sharding(stacked))
    varying = tuple(aval.mat.varying)  # over mesh axes, inside shard_map
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros


def explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of the type `aval`, or None where the mesh has no explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and not sharding.mesh.empty else None
