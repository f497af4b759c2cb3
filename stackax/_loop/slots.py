"""Reading and writing kept carries, such that a batch of them is read and written as one.

Batched, `jax.lax.dynamic_slice` becomes a gather, and its update a scatter, though the index is
the same for the whole batch. Neither works on the host's memory, nor always in place. These are the
same operations as primitives that stay what they are; like the loops that use them, they have no
reverse mode.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, mapped_aval
from jax.interpreters import ad, batching, mlir

from .first_order import refuse_reverse


def read_slot(stack: Any, slot: Any) -> Any:
    """`stack[slot]`."""
    return read_p.bind(stack, slot, axis=0)


def write_slot(stack: Any, value: Any, slot: Any) -> Any:
    """`stack`, with `value` at `slot`."""
    return write_p.bind(stack, value, slot, axis=0)


def _read(stack: Any, slot: Any, *, axis: int) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, slot, axis, keepdims=False)


def _write(stack: Any, value: Any, slot: Any, *, axis: int) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, value, slot, axis)


def _primitive(name: str, f: Any, abstract: Any) -> Primitive:
    primitive = Primitive(f"scheduled_loop_{name}")
    primitive.def_impl(f)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=False))
    return primitive


read_p = _primitive(
    "read", _read, lambda stack, slot, *, axis: mapped_aval(stack.shape[axis], axis, stack)
)
write_p = _primitive("write", _write, lambda stack, value, slot, *, axis: stack)


def _zero(value: Any) -> ad.Zero:
    return ad.Zero.from_primal_value(value)  # pyright: ignore[reportAttributeAccessIssue]


def _read_jvp(primals: Sequence, tangents: Sequence, *, axis: int):
    out = read_p.bind(*primals, axis=axis)
    if isinstance(tangents[0], ad.Zero):
        return out, _zero(out)
    return out, read_p.bind(tangents[0], primals[1], axis=axis)


def _write_jvp(primals: Sequence, tangents: Sequence, *, axis: int):
    out = write_p.bind(*primals, axis=axis)
    if all(isinstance(t, ad.Zero) for t in tangents[:2]):
        return out, _zero(out)
    moving = map(ad.instantiate_zeros, tangents[:2])
    return out, write_p.bind(*moving, primals[2], axis=axis)


ad.primitive_jvps[read_p] = _read_jvp
ad.primitive_jvps[write_p] = _write_jvp
ad.primitive_transposes[read_p] = refuse_reverse
ad.primitive_transposes[write_p] = refuse_reverse


# A batch axis comes first, before the axis of the slots. Which slot it is never depends on data.


def _read_batch(operands: Sequence, dims: Sequence, *, axis: int):
    (stack, slot), (dim, _) = operands, dims
    return read_p.bind(jnp.moveaxis(stack, dim, 0), slot, axis=axis + 1), 0


def _write_batch(operands: Sequence, dims: Sequence, *, axis: int):
    stack, value, slot = operands
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    stack, value = (
        jnp.moveaxis(x, dim, 0) if dim is not None else jnp.broadcast_to(x, (size, *x.shape))
        for x, dim in zip((stack, value), dims, strict=False)
    )
    return write_p.bind(stack, value, slot, axis=axis + 1), 0


batching.primitive_batchers[read_p] = _read_batch
batching.primitive_batchers[write_p] = _write_batch
