"""What the backward pass keeps: one entry for each value, and where it comes from."""

import functools as ft
from typing import Any, Literal, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import name_p

from .. import _jax
from ._bytes import bytes_of
from ._program import Program
from ._source import source_of
from ._walk import Loop, Reader, call_of, scan_of

Kind = Literal["argument", "constant", "carry", "slice", "computed"]

# What returns its operand, as far as a value is concerned.
_SAME_VALUE = frozenset(
    {
        "copy",
        "copy_p",
        "device_put",
        "optimization_barrier",
        "reduce_precision",  # how jax.checkpoint marks a value that it keeps
        "scheduled_loop_first_order",
    }
)
CHECKPOINTS = ("remat2", "checkpoint", "remat")


class Residual(NamedTuple):
    """A value that the backward pass keeps.

    Attributes:
        name: Its `checkpoint_name`, if it has one.
        kind: `"argument"` (it is one, and adds nothing), `"constant"` (closed over, or the same
            for every layer), `"carry"` (what a layer was given by the one before), `"slice"`
            (a layer's part of something stacked) or `"computed"`.
        origin: For an argument, a constant or a slice, the path of the argument that it is.
        primitive: The operation that made it, such as `"dot_general"`.
        source: File, line and function of that operation in the user's code.
        shape: Of one layer's, if there is one for each layer; else of the whole.
        axes: The names of its axes, if it is an argument that is a NamedArray.
        dtype: Its dtype.
        layers: How many of it are kept: trips of the loops around it, from the outermost.
        bytes_per_layer: Bytes of one.
        bytes: Bytes in all.
        memory: Where it is kept, `"device"` or `"host"`.
        depends_on: What it is computed from: `"carry"`, `"per-layer input"`, `"constants"`, and
            outside of loops `"arguments"`.
        why: Who reads it.
    """

    name: str | None
    kind: Kind
    origin: str | None
    primitive: str
    source: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] | None
    dtype: Any
    layers: tuple[int, ...]
    bytes_per_layer: int
    bytes: int
    memory: Literal["device", "host"]
    depends_on: frozenset[str]
    why: str

    @property
    def extent(self) -> Literal["per layer", "once"]:
        """Whether it is kept for each layer, so that its bytes grow with the depth."""
        return "per layer" if self.layers else "once"

    @property
    def label(self) -> str:
        """What to call it in a table."""
        named = {"computed": self.primitive, "carry": "carry"}
        return self.name or self.origin or named.get(self.kind, self.kind)


class Scope(NamedTuple):
    """A jaxpr, and the equation of another scope that runs it.

    Attributes:
        jaxpr: The jaxpr.
        labels: What each of its inputs depends on.
        parent: The scope of the equation, or None for the program itself.
        eqn: The equation.
        loop: The loop that it is, if it is one.
    """

    jaxpr: Jaxpr
    labels: tuple[frozenset[str], ...]
    parent: "Scope | None" = None
    eqn: JaxprEqn | None = None
    loop: Loop | None = None


class Found(NamedTuple):
    """Where a value comes from: the last equation or input before it, and what was passed."""

    kind: Kind
    scope: Scope
    eqn: JaxprEqn | None
    argument: int | None
    name: str | None
    layers: tuple[int, ...]
    depends_on: frozenset[str]
    var: Any


class Tracker:
    """Follows the values of one program to where they come from and to who reads them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.reader = Reader()
        inputs = tuple(frozenset({"arguments"}) for _ in program.jaxpr.invars)
        self.top = Scope(program.jaxpr, inputs)
        self._labels: dict[int, dict[Var, frozenset[str]]] = {}
        self._scopes: list[Scope] = []

    def find(self, var: Any, scope: Scope | None = None) -> Found:
        """Where the value of `var` comes from."""
        return self._find(var, scope or self.top, None, ())

    def _find(self, var: Any, scope: Scope, name: str | None, layers: tuple[int, ...]) -> Found:
        made = self.reader.maker(scope.jaxpr, var)
        if made is None:
            return self._find_input(var, scope, name, layers)
        eqn, place = made
        if eqn.primitive is name_p:
            return self._find(eqn.invars[0], scope, name or eqn.params["name"], layers)
        is_view = scope.parent is None and eqn.primitive.name == "reshape"
        if eqn.primitive.name in _SAME_VALUE or (is_view and self._is_argument(eqn.invars[0])):
            return self._find(eqn.invars[place], scope, name, layers)
        if eqn.primitive.name == "scheduled_loop_write":  # a carry, put beside the others
            found = self._find(eqn.invars[1], scope, name, (*layers, var.aval.shape[0]))
            return found._replace(kind="carry", eqn=None)
        loop = scan_of(eqn)
        if loop is not None:
            layers = layers if place < loop.carries else (*layers, loop.length)
            inner = self.enter_loop(scope, eqn, loop)
            return self._find(loop.body.outvars[place], inner, name, layers)
        called = call_of(eqn)
        if called is not None:
            inner = self.enter_call(scope, eqn, called)
            return self._find(called.outvars[place], inner, name, layers)
        depends_on = self.labels(scope).get(var) or frozenset({"constants"})
        return Found("computed", scope, eqn, None, name, layers, depends_on, var)

    def _is_argument(self, var: Any) -> bool:
        """Whether a value of the program itself is an argument, of which a reshape is a view."""
        return self.find(var).kind == "argument"

    def _find_input(
        self, var: Any, scope: Scope, name: str | None, layers: tuple[int, ...]
    ) -> Found:
        place = scope.jaxpr.invars.index(var) if var in scope.jaxpr.invars else None
        found = ft.partial(Found, scope=scope, eqn=None, name=name, layers=layers, var=var)
        if place is None:
            return found(kind="constant", argument=None, depends_on=frozenset({"constants"}))
        label = scope.labels[place]
        if scope.parent is None:
            return found(kind="argument", argument=place, depends_on=label)
        assert scope.eqn is not None
        operand = scope.eqn.invars[place]
        if scope.loop is None:
            return self._find(operand, scope.parent, name, layers)
        consts, carries = scope.loop.consts, scope.loop.carries
        is_carry = consts <= place < consts + carries
        if is_carry and scope.loop.body.outvars[place - consts] is not var:
            return found(kind="carry", argument=None, depends_on=label)
        outer = self._find(operand, scope.parent, None, ())
        if place < consts or is_carry:  # a carry that never changes
            label = frozenset({"constants"})
            return found(kind="constant", argument=outer.argument, depends_on=label)
        return found(kind="slice", argument=outer.argument, depends_on=label)

    def enter_loop(self, scope: Scope, eqn: JaxprEqn, loop: Loop) -> Scope:
        """The scope of a loop's body."""
        outer = self._operand_labels(scope, eqn)
        ends = (loop.consts, loop.consts + loop.carries)
        if scope.parent is None:  # the loop over the layers: its inputs are what rows are about
            names = ["constants"] * ends[0] + ["carry"] * loop.carries
            names += ["per-layer input"] * (len(outer) - ends[1])
            labels = [frozenset({name}) for name in names]
        else:
            around = frozenset().union(*outer)
            labels = [around if ends[0] <= i < ends[1] else own for i, own in enumerate(outer)]
        return self._remember(Scope(loop.body, tuple(labels), scope, eqn, loop))

    def enter_call(self, scope: Scope, eqn: JaxprEqn, called: Jaxpr) -> Scope:
        """The scope of a called jaxpr."""
        return self._remember(Scope(called, self._operand_labels(scope, eqn), scope, eqn))

    def labels(self, scope: Scope) -> dict[Var, frozenset[str]]:
        """What each variable of a scope depends on."""
        if id(scope) not in self._labels:
            self._remember(scope)
            known = dict(zip(scope.jaxpr.invars, scope.labels, strict=True))
            for eqn in scope.jaxpr.eqns:
                operands = [known.get(x, frozenset()) for x in eqn.invars if isinstance(x, Var)]
                known.update(dict.fromkeys(eqn.outvars, frozenset().union(*operands)))
            self._labels[id(scope)] = known
        return self._labels[id(scope)]

    def _operand_labels(self, scope: Scope, eqn: JaxprEqn) -> tuple[frozenset[str], ...]:
        known = self.labels(scope)
        none: frozenset[str] = frozenset()
        return tuple(known.get(x, none) if isinstance(x, Var) else none for x in eqn.invars)

    def _remember(self, scope: Scope) -> Scope:
        self._scopes.append(scope)  # so that no id is given twice
        return scope

    def backward_reader(self, var: Any) -> JaxprEqn | None:
        """The first operation of the backward pass that reads a value of the program itself."""
        for eqn in self.reader.readers(self.top.jaxpr, var):
            if _jax.is_transposed(eqn):
                return self._inmost_reader(self.top.jaxpr, var, eqn)
        return None

    def _inmost_reader(self, jaxpr: Jaxpr, var: Any, eqn: JaxprEqn) -> JaxprEqn:
        loop = scan_of(eqn)
        inner = loop.body if loop else call_of(eqn)
        if inner is None or eqn.primitive.name in CHECKPOINTS:
            return eqn
        place = eqn.invars.index(var)
        readers = self.reader.readers(inner, inner.invars[place])
        return self._inmost_reader(inner, inner.invars[place], readers[0]) if readers else eqn


def residuals_of(program: Program, tracker: Tracker | None = None) -> list[Residual]:
    """An entry for each array that `jax.vjp` keeps, in its order.

    Args:
        program: The program.
        tracker: Its tracker, if there is one already.

    Returns:
        The entries. Their bytes add up to those of the arrays in `jax.vjp`'s pullback.
    """
    tracker = tracker or Tracker(program)
    return [_residual(tracker, var) for var in program.residuals]


def _residual(tracker: Tracker, var: Any) -> Residual:
    found = tracker.find(var)
    total = bytes_of(var.aval)
    argument = None if found.argument is None else tracker.program.arguments[found.argument]
    shape = tuple(var.aval.shape[len(found.layers) :])
    axes = argument.axes if argument is not None and found.kind == "argument" else None
    count = 1
    for length in found.layers:
        count *= length
    return Residual(
        name=found.name,
        kind=found.kind,
        origin=argument and argument.path,
        primitive=found.eqn.primitive.name if found.eqn else "",
        source=source_of_value(found),
        shape=shape,
        axes=tuple(axis.name for axis in axes) if axes else None,
        dtype=var.aval.dtype,
        layers=found.layers,
        bytes_per_layer=total // max(1, count),
        bytes=total,
        memory="host" if _jax.is_on_host(var.aval) else "device",
        depends_on=found.depends_on,
        why=_why(tracker, var, found),
    )


def source_of_value(found: Found) -> str:
    """Where the value is made: its equation's line, or that of the call or loop around it."""
    eqn, scope = found.eqn, found.scope
    while True:
        if eqn is not None and (source := source_of(eqn)):
            return source
        if scope.parent is None:
            return ""
        eqn, scope = scope.eqn, scope.parent


def _why(tracker: Tracker, var: Any, found: Found) -> str:
    reader = tracker.backward_reader(var)
    if reader is None:
        return "the backward pass returns it"
    if reader.primitive.name in CHECKPOINTS:
        return (
            "kept by name" if found.name and found.kind == "computed" else "its layer is run again"
        )
    if reader.primitive.name in ("scheduled_loop_read", "while"):
        return "layers from it on are run again"
    where = source_of(reader)
    at = f", at {where}" if where and where != source_of_value(found) else ""
    return f"{reader.primitive.name} needs it{at}"
