"""Habits of one backend's compiler, kept apart from what all of them do.

On other backends than the CPU none of these applies. What they do instead is not modelled: a GPU's
or TPU's schedule is made to save memory, or to hide transfers, so the estimate is likely above the
compiler's figure there.
"""

import math
from collections.abc import Sequence

import jax

from ._operations import ELEMENTWISE, Op

# What the kernels of the CPU's library (YNNPACK) can compute of an entry. No comparison or select.
LIBRARY = frozenset(
    "add sub mul neg max min abs exp div integer_pow square add_any ceil floor sign sqrt "
    "convert_element_type tanh log".split()
)
# Smaller arrays are not worth the library's call: 2048 entries were left out, 4096 taken in.
LIBRARY_ENTRIES = 4096


def has_library() -> bool:
    """Whether reductions, and what is around them, are given to a library of kernels."""
    return jax.default_backend() == "cpu"


def library_computes(op: Op) -> bool:
    """Whether the library can compute an operation beside a reduction."""
    if op.kind == "same":
        return True
    if op.kind == "spread":
        return len(op.inputs) == 1
    is_known = op.kind in ELEMENTWISE and op.where in LIBRARY
    return is_known and math.prod(op.shape) >= LIBRARY_ENTRIES


def is_computed_once(op: Op) -> bool:
    """Whether an elementwise operation is kept rather than computed again by each reader.

    A CPU computes bfloat16 in float32 and rounds each result, which is several operations each
    time, and more of them than the compiler lets a reader repeat.
    """
    is_rounded = op.kind == "cheap" and op.itemsize == 2 and jax.default_backend() == "cpu"
    return op.kind == "costly" or is_rounded


def left_operand_is_widened(itemsize: int, shape: Sequence[int], contracted: Sequence[int]) -> bool:
    """Whether a product of two-byte entries is computed from float32 copies of its operands.

    The CPU's library takes a left operand only with the contracted axis last.
    """
    is_last = tuple(contracted) == (len(shape) - 1,)
    return jax.default_backend() == "cpu" and itemsize == 2 and not is_last
