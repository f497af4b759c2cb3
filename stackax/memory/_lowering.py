"""From a traced program to operations, with the rewritings that the compiler does first.

Calls are inlined. A `scan` becomes a loop over whole arrays: its inputs are read by slices, and its
outputs are buffers that exist from its start and are written in place. Equal operations are one.
Matrix products have their operands in the order that the compiler's products take.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # pyright: ignore

from .. import _jax
from ._backend import left_operand_is_widened
from ._bytes import bytes_of, itemsize_of
from ._operations import ELEMENTWISE, SLICE, WRITE, Graph, Loop, Op
from ._prune import prune

KINDS = {
    "cheap": (
        "add sub mul neg max min select_n convert_element_type and or not xor eq ne lt le gt ge "
        "eq_to le_to lt_to sign floor ceil round abs is_finite square add_any clamp real imag "
        "complex conj shift_left shift_right_logical shift_right_arithmetic population_count clz "
        "reduce_precision bitcast_convert_type nextafter copy copy_p"
    ),
    "costly": (
        "exp exp2 log log1p expm1 tanh logistic sin cos tan div rsqrt sqrt pow integer_pow erf "
        "erf_inv erfc rem atan2 cbrt lgamma digamma asin acos atan sinh cosh asinh acosh atanh "
        "bessel_i0e bessel_i1e igamma igammac polygamma regularized_incomplete_beta zeta"
    ),
    "spread": "broadcast_in_dim iota",
    "move": "slice dynamic_slice pad rev gather scheduled_loop_read",
    "same": "reshape squeeze expand_dims",
    "join": "concatenate",
    "update": "dynamic_update_slice scheduled_loop_write",
    "reduce": (
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
    ),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}

# Nothing is left of these once a program is compiled.
NOTHING = frozenset(
    "stop_gradient name sharding_constraint pvary pcast mesh_cast reshard layout_constraint "
    "scheduled_loop_first_order".split()
)


class Type(NamedTuple):
    """What is needed of an array's type."""

    shape: tuple[int, ...]
    dtype: Any


class Entry(NamedTuple):
    """What is needed of a dtype."""

    itemsize: int


def graph_of(closed: ClosedJaxpr) -> Graph:
    """The graph of a whole program."""
    jaxpr = closed.jaxpr
    graph = _graph_of(jaxpr, [*jaxpr.constvars, *jaxpr.invars], len(jaxpr.constvars))
    prune(graph)
    return graph


def _graph_of(jaxpr: Jaxpr, variables: Sequence[Any], consts: int = 0) -> Graph:
    lowering = _Lowering(Graph())
    given = [_given(var.aval) for var in variables]
    lowering.graph.given = given
    lowering.graph.results = lowering.inline(jaxpr, given[:consts], given[consts:])
    return lowering.graph


class _Lowering:
    """Adds equations to a graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def add(
        self,
        kind: str,
        aval: Any,
        inputs: Sequence[Op],
        where: str = "",
        key: Any = None,
        is_unary: bool = False,
    ) -> Op:
        """A new operation, or the one with the same `key` and inputs that there is."""
        if key is not None:
            key = (key, *map(id, inputs), tuple(aval.shape))
            if key in self.graph.known:
                return self.graph.known[key]
        op = Op(kind, aval.shape, bytes_of(aval), inputs, where, is_unary)
        op.is_host = _jax.is_on_host(aval)
        self.graph.ops.append(op)
        if key is not None:
            self.graph.known[key] = op
        return op

    def inline(self, jaxpr: Jaxpr, consts: Sequence[Op], args: Sequence[Op]) -> list[Op]:
        """The outputs of a jaxpr."""
        env: dict[Any, Op] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Op:
            return self.literal(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
        """The outputs of an equation."""
        name = eqn.primitive.name
        if name in SPECIAL:
            return SPECIAL[name](self, eqn, inputs)
        inner = _called(eqn)
        if inner is not None:
            return self.call(inner, inputs)
        if name in NOTHING:
            return inputs[: len(eqn.outvars)]
        if len(eqn.outvars) != 1:
            op = self.add("opaque", Type((), Entry(0)), inputs, name)
            return self.parts(op, eqn)
        aval = _types(eqn)[0]
        if _is_reshape(name, inputs, aval):
            return [self.reshape(inputs[0], aval.shape)]
        return [self.single(eqn, _kind(eqn), inputs)]

    def single(self, eqn: JaxprEqn, kind: str, inputs: list[Op]) -> Op:
        """An operation with one output."""
        name, aval = eqn.primitive.name, _types(eqn)[0]
        if kind in ELEMENTWISE:
            inputs = [self.repeat(x, aval.shape) for x in inputs]
        if name == "div" and inputs[1].kind == "spread":
            kind, inputs = "cheap", [inputs[0], self.reciprocal(inputs[1])]
        large = [x for x in inputs if len(x.shape) >= len(aval.shape) and x.kind != "spread"]
        is_unary = kind in ("move", "spread") or len(large) <= 1
        return self.add(kind, aval, inputs, name, _key(eqn), is_unary)

    def call(self, jaxpr: Jaxpr, inputs: list[Op]) -> list[Op]:
        """The outputs of a call, which leaves no trace."""
        return self.inline(jaxpr, self.constants(jaxpr), inputs)

    def constants(self, jaxpr: Jaxpr) -> list[Op]:
        """What an inner jaxpr closes over: a part of the program, and no temporary memory."""
        return [self.add("spread", var.aval, (), "constant") for var in jaxpr.constvars]

    def parts(self, op: Op, eqn: JaxprEqn) -> list[Op]:
        """The outputs of an operation with several."""
        parts = [self.add("part", var.aval, [op], op.where) for var in eqn.outvars]
        for index, part in enumerate(parts):
            part.index = index
        return parts

    def literal(self, value: Any, aval: Any) -> Op:
        """A constant."""
        return self.add("spread", aval, (), key=("literal", str(value), str(aval.dtype)))

    def reshape(self, x: Op, shape: Sequence[int]) -> Op:
        """`x` in another shape."""
        if tuple(shape) == x.shape:
            return x
        return self.derive("same", x, shape, "reshape", ())

    def repeat(self, x: Op, shape: Sequence[int]) -> Op:
        """`x` with its axes of one entry repeated, which elementwise equations do of themselves."""
        if len(x.shape) != len(shape) or x.shape == tuple(shape):
            return x
        return self.derive("spread", x, shape, "broadcast_in_dim", ())

    def reciprocal(self, x: Op) -> Op:
        """One over a broadcast, taken before it, which a quotient is multiplied with instead."""
        if not x.inputs:
            return x
        source = x.inputs[0]
        over = self.derive("costly", source, source.shape, "reciprocal", ())
        return self.derive("spread", over, x.shape, "broadcast_in_dim", ())

    def transpose(self, x: Op, shape: Sequence[int], permutation: Sequence[int]) -> Op:
        """`x`, seen in `shape`, with its axes permuted; axes of one entry move for nothing."""
        moving = [axis for axis in permutation if shape[axis] > 1]
        permuted = [shape[axis] for axis in permutation]
        if moving == sorted(moving):
            return self.reshape(x, permuted)
        return self.derive("move", x, permuted, "transpose", tuple(permutation))

    def convert(self, x: Op, itemsize: int) -> Op:
        """`x` with entries of another size."""
        if x.itemsize == itemsize or not x.bytes:
            return x
        aval = Type(x.shape, Entry(itemsize))
        return self.add("cheap", aval, [x], "convert_element_type", ("convert", itemsize), True)

    def derive(self, kind: str, x: Op, shape: Sequence[int], where: str, key: Any) -> Op:
        """What an operation on `x` alone makes of it."""
        aval = Type(tuple(shape), Entry(x.itemsize))
        return self.add(kind, aval, [x], where, (where, key), is_unary=True)


def _types(eqn: JaxprEqn) -> list[Any]:
    """The types of an equation's outputs."""
    return [var.aval for var in eqn.outvars]


def _given(aval: Any) -> Op:
    op = Op("given", aval.shape, bytes_of(aval), ())
    op.is_host = _jax.is_on_host(aval)
    return op


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of an equation that is nothing but a call of it."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        inner = _jax.open_jaxpr(inner) if isinstance(inner, ClosedJaxpr) else inner
        if isinstance(inner, Jaxpr):
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return inner
    return None


def _is_reshape(name: str, inputs: list[Op], aval: Any) -> bool:
    """Whether nothing is repeated by a broadcast, or summed by a reduction."""
    if KIND_OF.get(name) == "same":
        return True
    may_be = name == "broadcast_in_dim" or (name.startswith("reduce_") and name in KIND_OF)
    return (
        may_be and len(inputs) == 1 and math.prod(inputs[0].shape) == math.prod(aval.shape)
    ) and name != "reduce_precision"


def _kind(eqn: JaxprEqn) -> str:
    name = eqn.primitive.name
    if name == "integer_pow" and 0 < eqn.params["y"] <= 4:
        return "cheap"  # a few products
    if name.startswith("scatter"):
        return "update"
    return KIND_OF.get(name, "opaque")


def _key(eqn: JaxprEqn) -> Any:
    """What an equation computes of its inputs, hashable."""
    params = [
        (name, value if isinstance(value, (int, str)) else str(value))
        for name, value in eqn.params.items()
        if name not in ("sharding", "out_sharding")
    ]
    return eqn.primitive.name, tuple(params), str(getattr(eqn.outvars[0].aval, "dtype", ""))


# Equations that need more than a kind.


def _transpose(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    return [self.transpose(inputs[0], inputs[0].shape, eqn.params["permutation"])]


def _product(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    contracted, batch = eqn.params["dimension_numbers"]
    out = _types(eqn)[0]
    sides = list(zip(inputs, batch, contracted, strict=True))
    as_they_are = all(_is_matrix(*side) for side in sides)
    itemsize = max(x.itemsize for x in inputs)
    if as_they_are and left_operand_is_widened(itemsize, inputs[0].shape, contracted[0]):
        itemsize = 4
    operands = [self.convert(x, itemsize) for x in inputs]
    if not as_they_are:
        for place, (_, b, c) in enumerate(sides):
            operands[place] = _as_matrix(self, operands[place], b, c, is_left=place == 0)
    aval = Type(out.shape, Entry(max(itemsize, itemsize_of(out))))
    op = self.add("product", aval, operands, "dot_general", _key(eqn))
    return [self.convert(op, itemsize_of(out))]


def _is_matrix(x: Op, batch: Sequence[int], contracted: Sequence[int]) -> bool:
    """Whether a product takes an operand as it is, in either order of its last two axes."""
    is_first = tuple(batch) == tuple(range(len(batch)))
    return is_first and len(x.shape) <= len(batch) + 2 and len(contracted) == 1


def _as_matrix(
    self: _Lowering, x: Op, batch: Sequence[int], contracted: Sequence[int], *, is_left: bool
) -> Op:
    """An operand with its axes merged to a matrix, after those of the batch.

    A copy, unless the axes are in order already. An operand of two axes is taken in either order.
    """
    if len(x.shape) <= 2:
        return x
    free = [i for i in range(len(x.shape)) if i not in (*batch, *contracted)]
    first, second = (free, list(contracted)) if is_left else (list(contracted), free)
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (first, second)]
    merged = [x.shape[i] for i in batch] + sizes
    return self.reshape(self.transpose(x, x.shape, [*batch, *first, *second]), merged)


def _split(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    return [
        self.add("move", var.aval, inputs, eqn.primitive.name, (_key(eqn), index), is_unary=True)
        for index, var in enumerate(eqn.outvars)
    ]


def _one_minus_square(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    """(1 + x)(1 - x), as it is lowered."""
    aval = _types(eqn)[0]
    one, dtype = self.literal("1.0", Type((), aval.dtype)), str(aval.dtype)
    plus, minus = (
        self.add("cheap", aval, [one, *inputs], name, (name, (), dtype)) for name in ("add", "sub")
    )
    return [self.add("cheap", aval, [plus, minus], "mul", ("mul", (), dtype))]


def _barrier(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    """Each of the inputs, to be read only when all of them are there."""
    if not _jax.barrier_survives_compilation():
        return inputs
    fences = []
    for x in inputs:
        others = [y for y in inputs if y is not x and y.shape]
        fences.append(self.add("fence", Type(x.shape, Entry(x.itemsize)), [x, *others]))
    return fences


def _remat(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    """A call, which a barrier keeps apart from the forward pass where JAX asks for one."""
    if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
        inputs = _barrier(self, eqn, inputs)
    return self.call(_jax.open_jaxpr(eqn.params["jaxpr"]), inputs)


def _device_put(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    """A copy where it goes from one memory to the other."""
    outputs = []
    for var, x in zip(eqn.outvars, inputs, strict=True):
        is_copy = _jax.is_on_host(var.aval) or x.is_host
        outputs.append(self.add("opaque" if is_copy else "fence", var.aval, [x], "device_put"))
    return outputs


def _scan(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    consts, carries = _jax.scan_sizes(eqn)
    if eqn.params["length"] <= max(1, eqn.params["unroll"]):
        return _unrolled(self, eqn, inputs, consts, carries)
    jaxpr = _jax.open_jaxpr(eqn.params["jaxpr"])
    stacked = _types(eqn)[carries:]
    given = [_given(var.aval) for var in jaxpr.invars[: consts + carries]]
    whole = [_given(atom.aval) for atom in eqn.invars[consts + carries :]]
    buffers = [_given(aval) for aval in stacked]
    body = _Lowering(Graph())
    slices = [
        body.add("move", var.aval, [x], SLICE, is_unary=True)
        for var, x in zip(jaxpr.invars[consts + carries :], whole, strict=True)
    ]
    out = body.inline(jaxpr, body.constants(jaxpr), given + slices)
    writes = [
        body.add("update", aval, [buffer, value], WRITE)
        for aval, buffer, value in zip(stacked, buffers, out[carries:], strict=True)
    ]
    body.graph.given = given[:consts] + whole + given[consts:] + buffers
    body.graph.results = out[:carries] + writes
    zeros = [self.add("spread", aval, (), "zeros") for aval in stacked]
    invariants = inputs[:consts] + inputs[consts + carries :]
    starts = inputs[consts : consts + carries] + zeros
    return _loop(self, eqn, Loop(body.graph, len(invariants)), invariants + starts)


def _unrolled(
    self: _Lowering, eqn: JaxprEqn, inputs: list[Op], consts: int, carries: int
) -> list[Op]:
    """A loop that is replaced by its steps, because it has one or is wholly unrolled."""
    jaxpr, length = _jax.open_jaxpr(eqn.params["jaxpr"]), eqn.params["length"]
    carry, whole = inputs[consts : consts + carries], inputs[consts + carries :]
    rows = []
    for step in range(length):
        slices = [
            self.add("move", var.aval, [x], "slice", ("step", step), is_unary=True)
            if length > 1
            else self.reshape(x, x.shape[1:])
            for var, x in zip(jaxpr.invars[consts + carries :], whole, strict=True)
        ]
        out = self.call(jaxpr, [*inputs[:consts], *carry, *slices])
        carry = out[:carries]
        rows.append(out[carries:])
    stacked = _types(eqn)[carries:]
    if length == 1:
        pairs = zip(rows[0], stacked, strict=True)
        return carry + [self.reshape(x, aval.shape) for x, aval in pairs]
    return carry + [
        self.add("join", aval, [row[i] for row in rows], "concatenate")
        for i, aval in enumerate(stacked)
    ]


def _while(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    """A loop; how often it runs does not matter to its peak."""
    jaxpr = _jax.open_jaxpr(eqn.params["body_jaxpr"])
    graph = _graph_of(jaxpr, jaxpr.invars)
    loop = Loop(graph, eqn.params["body_nconsts"])
    return _loop(self, eqn, loop, inputs[eqn.params["cond_nconsts"] :])


def _loop(self: _Lowering, eqn: JaxprEqn, loop: Loop, inputs: list[Op]) -> list[Op]:
    op = self.add("loop", Type((), Entry(0)), inputs, eqn.primitive.name)
    op.body = loop
    return self.parts(op, eqn)


def _cond(self: _Lowering, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    branches = [_jax.open_jaxpr(branch) for branch in eqn.params["branches"]]
    op = self.add("cond", Type((), Entry(0)), inputs[1:], "cond")
    op.body = [_graph_of(jaxpr, jaxpr.invars) for jaxpr in branches]
    return self.parts(op, eqn)


SPECIAL: dict[str, Callable[[_Lowering, JaxprEqn, list[Op]], list[Op]]] = {
    "transpose": _transpose,
    "dot_general": _product,
    "split": _split,
    "unstack": _split,
    "one_minus_square": _one_minus_square,
    "optimization_barrier": _barrier,
    "remat2": _remat,
    "remat": _remat,
    "checkpoint": _remat,
    "device_put": _device_put,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
