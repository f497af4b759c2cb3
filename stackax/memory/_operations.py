"""A traced program as a graph of operations, in the form that the compiler works on.

Calls are inlined, a `scan` becomes a loop over whole arrays (its inputs are read by a slice, its
outputs are buffers that exist from its start and are written in place), a reshape is no operation,
dead and equal operations are gone, and a matrix product has its operands in the order that the
compiler's matrix products take.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .. import _jax

# Kinds of operations.
#   given       a parameter of the graph
#   cheap       computed per element, cheaply enough to be computed again by each reader
#   costly      computed per element
#   spread      a broadcast or an iota, of which no element needs memory
#   move        reads each element somewhere else: transpose, slice, pad, reverse
#   join        a concatenation
#   update      writes a part of its first input
#   reduce      a reduction
#   product     a matrix product, a convolution
#   opaque      anything else that has an output of its own
#   loop, cond  an operation with graphs of its own
#   part        one of the outputs of an operation with several
#   same        a reshape: the same numbers in the same order
#   fence       its input, which nothing is fused or merged across


class Op:
    """One operation and its output: what the compiler may give a buffer."""

    __slots__ = (
        "kind",
        "shape",
        "bytes",
        "inputs",
        "users",
        "where",
        "is_host",
        "body",
        "index",
        "live",
        "is_unary",
    )

    def __init__(self, kind: str, shape, nbytes: int, inputs: Sequence["Op"], where: str = ""):
        self.kind = kind
        self.shape = tuple(shape)
        self.bytes = nbytes
        self.inputs = list(inputs)
        self.users: list[Op] = []
        self.where = where
        self.is_host = False
        self.body: Any = None
        self.index = 0
        self.live = False
        self.is_unary = False

    def __repr__(self) -> str:
        return f"{self.kind}{list(self.shape)}@{id(self) % 10000}"


class Graph:
    """Operations in program order: parameters, the rest, and which of them are the results."""

    def __init__(self):
        self.given: list[Op] = []
        self.ops: list[Op] = []
        self.results: list[Op] = []
        self.seen: dict[Any, Op] = {}


class Loop:
    """What a loop repeats.

    The graph is given the invariants, then the carry; its results are the next carry. Buffers that
    gather a scan's outputs are part of the carry.
    """

    def __init__(self, graph: Graph, invariants: int, length: int | None):
        self.graph = graph
        self.invariants = invariants
        self.length = length


def graph_of(closed: ClosedJaxpr) -> Graph:
    """The graph of a whole program."""
    graph = Graph()
    jaxpr = closed.jaxpr
    builder = _Builder(graph)
    args = [builder.given(var.aval) for var in jaxpr.invars]
    graph.given = list(args)
    consts = [builder.given(var.aval) for var in jaxpr.constvars]
    graph.given += consts
    graph.results = builder.inline(jaxpr, consts, args)
    _prune(graph)
    return graph


def bytes_of(aval: Any) -> int:
    """The bytes of a value."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


CHEAP = frozenset(
    "add sub mul neg max min select_n convert_element_type and or not xor eq ne lt le gt ge sign "
    "floor ceil round abs is_finite square one_minus_square add_any clamp real imag shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz reduce_precision "
    "bitcast_convert_type nextafter complex conj copy copy_p eq_to le_to lt_to".split()
)
COSTLY = frozenset(
    "exp exp2 log log1p expm1 tanh logistic sin cos tan div rsqrt sqrt pow erf erf_inv erfc rem "
    "atan2 cbrt lgamma digamma asin acos atan sinh cosh asinh acosh atanh integer_pow "
    "random_gamma_grad bessel_i0e bessel_i1e igamma igammac polygamma regularized_incomplete_beta "
    "zeta".split()
)
REDUCE = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin "
    "reduce".split()
)
RESHAPE = frozenset("reshape squeeze expand_dims".split())
SAME = frozenset("stop_gradient name sharding_constraint pvary pcast "
                 "mesh_cast reshard layout_constraint psum_invariant scheduled_loop_first_order".split())
MOVE = frozenset("slice dynamic_slice pad rev gather real_gather".split())


class _Builder:
    """Adds a jaxpr's equations to a graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def given(self, aval: Any) -> Op:
        return Op("given", aval.shape, bytes_of(aval), ())

    def add(self, kind: str, aval: Any, inputs: Sequence[Op], where: str = "", key: Any = None) -> Op:
        """A new operation, or the equal one that there is."""
        if key is not None:
            key = (key, *map(id, inputs), tuple(aval.shape))
            try:
                if key in self.graph.seen:
                    return self.graph.seen[key]
            except TypeError:
                key = None
        op = Op(kind, aval.shape, bytes_of(aval), inputs, where)
        self.graph.ops.append(op)
        if key is not None:
            self.graph.seen[key] = op
        return op

    def inline(self, jaxpr: Jaxpr, consts: Sequence[Op], args: Sequence[Op]) -> list[Op]:
        env: dict[Any, Op] = dict(zip(jaxpr.constvars, consts, strict=False))
        env.update(zip(jaxpr.invars, args, strict=False))

        def read(atom: Any) -> Op:
            if isinstance(atom, Literal):
                return self.add("spread", atom.aval, (), key=("literal", str(atom.val), str(atom.aval.dtype)))
            return env[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=False))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
        name = eqn.primitive.name
        special = SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, inputs)
        inner = _inner(eqn)
        if inner is not None:
            consts = [self.given(var.aval) for var in inner.constvars]
            return self.inline(inner, consts, inputs)
        if name in SAME:
            return inputs[:1]
        aval = eqn.outvars[0].aval if eqn.outvars else None
        if name in RESHAPE or (
            name == "broadcast_in_dim" and inputs[0].bytes == bytes_of(aval) and len(inputs) == 1
        ):
            return [self.reshape(inputs[0], aval)]
        if len(eqn.outvars) == 1:
            kind = _kind(name, eqn)
            if name == "div" and inputs[1].kind == "spread":
                kind = "cheap"  # becomes a product with the reciprocal, taken before the broadcast
            op = self.add(kind, aval, inputs, name, _key(eqn))
            op.is_unary = kind in ("move", "spread") or sum(
                len(x.shape) >= len(op.shape) and x.kind != "spread" for x in inputs
            ) <= 1
            return [op]
        return self.several("opaque", eqn, inputs)

    def reshape(self, x: Op, aval: Any) -> Op:
        """`x` in another shape."""
        if tuple(aval.shape) == x.shape:
            return x
        op = self.add("same", aval, [x], "reshape", ("reshape",))
        op.is_unary = True
        return op

    def several(self, kind: str, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
        op = Op(kind, (), 0, inputs, eqn.primitive.name)
        self.graph.ops.append(op)
        return self.parts(op, [var.aval for var in eqn.outvars])

    def parts(self, op: Op, avals: Sequence[Any]) -> list[Op]:
        parts = []
        for index, aval in enumerate(avals):
            part = Op("part", aval.shape, bytes_of(aval), (op,), op.where)
            part.index = index
            self.graph.ops.append(part)
            parts.append(part)
        return parts


def _inner(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of an equation that is a call of it."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        jaxpr = getattr(inner, "jaxpr", inner)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
            if len(jaxpr.outvars) == len(eqn.outvars):
                return jaxpr
    return None


def _kind(name: str, eqn: JaxprEqn) -> str:
    if name == "integer_pow" and 0 < eqn.params["y"] <= 4:
        return "cheap"
    if name in CHEAP:
        return "cheap"
    if name in COSTLY:
        return "costly"
    if name in REDUCE:
        return "reduce"
    if name in MOVE:
        return "move"
    if name in ("broadcast_in_dim", "iota", "broadcast"):
        return "spread"
    if name == "concatenate":
        return "join"
    if name in ("dynamic_update_slice", "scheduled_loop_write") or name.startswith("scatter"):
        return "update"
    if name == "scheduled_loop_read":
        return "move"
    return "opaque"


def _key(eqn: JaxprEqn) -> Any:
    params = tuple((k, v if isinstance(v, (int, float, str, tuple)) else str(v))
                   for k, v in eqn.params.items() if k not in ("sharding", "out_sharding"))
    try:
        hash(params)
    except TypeError:
        params = str(params)
    return eqn.primitive.name, params, str(getattr(eqn.outvars[0].aval, "dtype", ""))


# Equations that need more than a kind.


def _transpose(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    return [self_transpose(self, inputs[0], eqn.invars[0].aval, eqn.params["permutation"])]


class _Aval:
    """A shape with a dtype."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), dtype


def self_transpose(self: _Builder, x: Op, aval: Any, permutation: Sequence[int]) -> Op:
    """`x` with its axes in another order; nothing at all if only axes of one entry move."""
    moving = [axis for axis in permutation if aval.shape[axis] > 1]
    shape = [aval.shape[axis] for axis in permutation]
    if moving == sorted(moving):
        return self.reshape(x, _Aval(shape, aval.dtype))
    op = self.add("move", _Aval(shape, aval.dtype), [x], "transpose", ("transpose", tuple(permutation), str(aval.dtype)))
    op.is_unary = True
    return op


def _dot(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    (contract, batch) = eqn.params["dimension_numbers"]
    avals = [atom.aval for atom in eqn.invars]
    ranks = [len(aval.shape) for aval in avals]
    canonical = all(
        tuple(b) == tuple(range(len(b))) and rank <= len(b) + 2 and len(c) == 1
        for b, c, rank in zip(batch, contract, ranks, strict=True)
    )
    operands = list(inputs)
    if not canonical:
        for side in (0, 1):
            operands[side] = _canonical(self, inputs[side], avals[side], batch[side], contract[side], side)
    return [self.add("product", eqn.outvars[0].aval, operands, "dot_general", _key(eqn))]


def _canonical(self: _Builder, x: Op, aval: Any, batch, contract, side: int) -> Op:
    """An operand in the order batch, free, contracted (or, on the right, the last two swapped).

    Swapping two whole axes, or groups of axes that a reshape merges, is free where the operand is
    a matrix: a product reads either order.
    """
    free = [i for i in range(len(aval.shape)) if i not in (*batch, *contract)]
    rest = (free, list(contract))
    order = [*batch, *rest[side], *rest[1 - side]]
    if len(aval.shape) <= 2:
        return x
    x = self_transpose(self, x, aval, order)
    sizes = [math.prod(aval.shape[i] for i in axes) for axes in (rest[side], rest[1 - side])]
    shape = [aval.shape[i] for i in batch] + sizes
    return self.reshape(x, _Aval(shape, aval.dtype))


def _split(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    outputs = []
    for index, var in enumerate(eqn.outvars):
        op = self.add("move", var.aval, inputs, eqn.primitive.name, (_key(eqn), index))
        op.is_unary = True
        outputs.append(op)
    return outputs


def _barrier(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    return [self.add("fence", var.aval, [x]) for var, x in zip(eqn.outvars, inputs, strict=True)]


def _device_put(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    outputs = []
    for var, x in zip(eqn.outvars, inputs, strict=True):
        op = self.add("fence", var.aval, [x], "device_put")
        op.is_host = is_host(var.aval)
        if op.is_host or x.is_host:
            op.kind = "opaque"
        outputs.append(op)
    return outputs


def is_host(aval: Any) -> bool:
    """Whether a value is placed in the host's memory."""
    space = str(getattr(aval, "memory_space", ""))
    return "Host" in space or "host" in space


def _scan(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    jaxpr = _jax.open_jaxpr(eqn.params["jaxpr"])
    consts, carries = _jax.scan_sizes(eqn)
    length = eqn.params["length"]
    if length == 1:
        return _once(self, eqn, jaxpr, inputs, consts + carries, carries)
    graph = Graph()
    inner = _Builder(graph)
    invariants = inputs[:consts] + inputs[consts + carries :]
    given = [inner.given(var.aval) for var in jaxpr.invars[:consts]]
    whole = [inner.given(atom.aval) for atom in eqn.invars[consts + carries :]]
    carry = [inner.given(var.aval) for var in jaxpr.invars[consts : consts + carries]]
    slices = []
    for var, x in zip(jaxpr.invars[consts + carries :], whole, strict=True):
        op = inner.add("move", var.aval, [x], "slice of the scan's input")
        op.is_unary = True
        slices.append(op)
    buffers = [inner.given(var.aval) for var in eqn.outvars[carries:]]
    out = inner.inline(jaxpr, [], [*given, *carry, *slices])
    written = [
        inner.add("update", buffer, [buffer, value], "output of the scan")
        if False
        else _write(inner, var.aval, buffer, value)
        for var, buffer, value in zip(eqn.outvars[carries:], buffers, out[carries:], strict=True)
    ]
    for buffer, var in zip(buffers, eqn.outvars[carries:], strict=True):
        buffer.is_host = is_host(var.aval)
    graph.given = given + whole + carry + buffers
    graph.results = out[:carries] + written
    zeros = []
    for var in eqn.outvars[carries:]:
        zero = self.add("spread", var.aval, (), "zeros")
        zero.is_host = is_host(var.aval)
        zeros.append(zero)
    starts = inputs[consts : consts + carries] + zeros
    return _loop(self, eqn, Loop(graph, len(invariants), length), invariants + starts)


def _write(inner: _Builder, aval: Any, buffer: Op, value: Op) -> Op:
    op = inner.add("update", aval, [buffer, value], "output of the scan")
    op.is_host = is_host(aval)
    return op


def _loop(self: _Builder, eqn: JaxprEqn, loop: Loop, inputs: list[Op]) -> list[Op]:
    op = Op("loop", (), 0, inputs, eqn.primitive.name)
    op.body = loop
    self.graph.ops.append(op)
    parts = self.parts(op, [var.aval for var in eqn.outvars])
    for part, var in zip(parts, eqn.outvars, strict=True):
        part.is_host = is_host(var.aval)
    return parts


def _once(self: _Builder, eqn, jaxpr, inputs, scanned: int, carries: int) -> list[Op]:
    """A loop of one trip, which the compiler replaces by its body."""
    return self.inline(jaxpr, [], inputs)


def _while(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    jaxpr = _jax.open_jaxpr(eqn.params["body_jaxpr"])
    unused, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    graph = Graph()
    inner = _Builder(graph)
    graph.given = [inner.given(var.aval) for var in jaxpr.invars]
    graph.results = inner.inline(jaxpr, [], graph.given)
    return _loop(self, eqn, Loop(graph, consts, None), inputs[unused:])


def _cond(self: _Builder, eqn: JaxprEqn, inputs: list[Op]) -> list[Op]:
    graphs = []
    for branch in eqn.params["branches"]:
        jaxpr = _jax.open_jaxpr(branch)
        graph = Graph()
        inner = _Builder(graph)
        graph.given = [inner.given(var.aval) for var in jaxpr.invars]
        graph.results = inner.inline(jaxpr, [], graph.given)
        graphs.append(graph)
    op = Op("cond", (), 0, inputs[1:], "cond")
    op.body = graphs
    self.graph.ops.append(op)
    return self.parts(op, [var.aval for var in eqn.outvars])


SPECIAL: dict[str, Callable[[_Builder, JaxprEqn, list[Op]], list[Op]]] = {
    "transpose": _transpose,
    "dot_general": _dot,
    "split": _split,
    "unstack": _split,
    "optimization_barrier": _barrier,
    "device_put": _device_put,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


# What nothing needs.


def _prune(graph: Graph) -> None:
    """Removes what no result depends on, and writes down the users of the rest."""
    _mark(graph.results)
    _sweep(graph)


def _mark(ops: Sequence[Op]) -> None:
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op.kind == "part" and not op.live:
            op.live = True
            stack += _demand(op.inputs[0], op.index)
            continue
        if op.live:
            continue
        op.live = True
        if op.kind == "cond":
            for graph in op.body:
                _mark(graph.results)
        if op.kind != "loop":
            stack += op.inputs


def _demand(op: Op, index: int) -> list[Op]:
    """What is needed for one output of an operation with several."""
    if op.kind != "loop":
        return [op]
    op.live = True
    loop: Loop = op.body
    wanted = {index}
    carries = loop.graph.given[loop.invariants :]
    while True:
        _mark([loop.graph.results[i] for i in wanted])
        more = {i for i, carry in enumerate(carries) if carry.live} - wanted
        if not more:
            break
        wanted |= more
    needed = [x for x, given in zip(op.inputs, loop.graph.given, strict=True) if given.live]
    starts = [op.inputs[loop.invariants + i] for i in wanted]
    for i in wanted:
        loop.graph.given[loop.invariants + i].live = True
    return needed + starts


def _sweep(graph: Graph) -> None:
    for op in graph.ops:
        if not op.live:
            continue
        if op.kind == "loop":
            loop: Loop = op.body
            keep = [given.live for given in loop.graph.given]
            op.inputs = [x for x, kept in zip(op.inputs, keep, strict=True) if kept]
            carries = keep[loop.invariants :]
            numbers = iter(range(len(carries)))
            places = {i: next(numbers) for i, kept in enumerate(carries) if kept}
            loop.graph.results = [r for r, kept in zip(loop.graph.results, carries, strict=True) if kept]
            loop.graph.given = [g for g, kept in zip(loop.graph.given, keep, strict=True) if kept]
            loop.invariants = sum(keep[: loop.invariants])
            op.index = 0
            op.shape = ()
            loop.places = places  # pyright: ignore
            _sweep(loop.graph)
        if op.kind == "cond":
            for branch in op.body:
                _sweep(branch)
    graph.ops = [op for op in graph.ops if op.live]
    for op in graph.ops:
        if op.kind == "part" and op.inputs[0].kind == "loop":
            op.index = op.inputs[0].body.places[op.index]
        for x in op.inputs:
            x.users.append(op)
