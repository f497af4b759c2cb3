"""What the compiler and the device say of a function."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._program import as_call, as_function_of_arrays


class Measurement(NamedTuple):
    """The compiler's figures for a jitted function, and its time.

    Attributes:
        temp_bytes: Temporary memory.
        argument_bytes: The arguments.
        output_bytes: What is returned.
        alias_bytes: The part of the outputs that is put into donated arguments.
        code_bytes: The program itself.
        device_peak_bytes: The most that the process has had on its first device so far, where the
            backend keeps count; else None, as on CPU.
        compile_seconds: Time to trace and compile.
        seconds: The median time of a run; None where arguments are shapes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax.memory import measure
        >>> shape = jax.ShapeDtypeStruct((256,), jnp.float32)
        >>> measured = measure(jax.grad(lambda x: jnp.sin(x).sum()), shape)
        >>> measured.argument_bytes, measured.output_bytes, measured.seconds
        (1024, 1024, None)
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    code_bytes: int
    device_peak_bytes: int | None
    compile_seconds: float
    seconds: float | None

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporary memory, what is aliased counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def measure(fn: Callable, *args: Any, rounds: int = 5) -> Measurement:
    """Compiles a function, asks the compiler what it needs, and times it.

    Args:
        fn: A function, which is jitted, or one that `jax.jit` made, whose donations then count. It
            is not differentiated: pass `jax.grad(loss)` for a step.
        *args: What it is called with: arrays, shapes, NamedArrays and pytrees of them.
        rounds: How often it is run to be timed, after one run to warm up. Arguments are copied for
            each run where the function takes donations.

    Returns:
        The figures.

    Raises:
        TypeError: An argument is neither an array nor made of arrays.
        ValueError: `rounds` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax.memory import measure
        >>> measure(lambda x: jnp.sin(x).sum(), jnp.ones(256)).argument_bytes
        1024
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    start = time.perf_counter()
    if hasattr(fn, "lower"):
        compiled, arrays = fn.lower(*args).compile(), args  # pyright: ignore[reportFunctionMemberAccess]
    else:
        value, arrays = as_function_of_arrays(as_call(fn, args, "measure"))
        compiled = jax.jit(value).lower(*arrays).compile()
    compile_seconds = time.perf_counter() - start
    # What equinox.filter_jit compiles wraps what JAX does.
    figures = compiled_bytes(getattr(compiled, "compiled", compiled))
    seconds = None
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        seconds = _median_seconds(compiled, arrays, rounds, copies=figures["alias_bytes"] > 0)
    of_device = jax.local_devices()[0].memory_stats() or {}
    return Measurement(
        **figures,
        device_peak_bytes=of_device.get("peak_bytes_in_use"),
        compile_seconds=compile_seconds,
        seconds=seconds,
    )


def compiled_bytes(compiled: Any) -> dict[str, int]:
    """The compiler's own figures for a compiled program, by the names of `Measurement`."""
    analysis = compiled.memory_analysis()
    return {
        "temp_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "code_bytes": analysis.generated_code_size_in_bytes,
    }


def _median_seconds(compiled: Any, arrays: Sequence[Any], rounds: int, copies: bool) -> float:
    seconds = []
    for _ in range(1 + rounds):
        given = jax.tree.map(jnp.copy, arrays) if copies else arrays
        jax.block_until_ready(given)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
