"""The one place that touches private or version-dependent JAX."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, unmapped_aval  # pyright: ignore

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


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants of the loop, and how many are its carry."""
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """A jaxpr in an equation's parameters, which are closed in some versions."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def name_stack(eqn: JaxprEqn) -> str:
    """The named scopes and transformations under which an equation was traced."""
    return str(eqn.source_info.name_stack)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation of a program belongs to its backward pass."""
    return "transpose(" in name_stack(eqn)


def user_frames(eqn: JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the calls that an equation comes from, the inmost first."""
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def is_on_host(aval: Any) -> bool:
    """Whether the type `aval` is that of an array in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def with_outputs(jaxpr: Jaxpr, outputs: Sequence[Any]) -> Jaxpr:
    """The same equations with other variables as outputs."""
    about = jaxpr.debug_info._replace(result_paths=None)
    return jaxpr.replace(outvars=list(outputs), debug_info=about)
