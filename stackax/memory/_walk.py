"""Reading a jaxpr: what an equation contains, where a value comes from, and who reads it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from .. import _jax


class Loop(NamedTuple):
    """The sizes of a `scan`.

    Attributes:
        body: What runs once a trip, of (constants, carry, slices) to (carry, outputs).
        length: The number of trips.
        consts: How many operands are the same for every trip.
        carries: How many values go round.
    """

    body: Jaxpr
    length: int
    consts: int
    carries: int


def scan_of(eqn: JaxprEqn) -> Loop | None:
    """What a `scan` runs, or None for anything else."""
    if eqn.primitive.name != "scan":
        return None
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    return Loop(body, eqn.params["length"], *_jax.scan_sizes(eqn))


def call_of(eqn: JaxprEqn) -> Jaxpr | None:
    """The one jaxpr that an equation calls on its operands, as `jit` and `checkpoint` do."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    inner = [_jax.open_jaxpr(j) for j in jaxprs_in_params(eqn.params)]
    fits = [
        j for j in inner if len(j.invars) == len(eqn.invars) and len(j.outvars) == len(eqn.outvars)
    ]
    return fits[0] if fits else None


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """All that an equation contains."""
    return [_jax.open_jaxpr(j) for j in jaxprs_in_params(eqn.params)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation, those inside others included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


class Reader:
    """Who makes and who reads each variable of a jaxpr, found once for each jaxpr."""

    def __init__(self) -> None:
        self._makers: dict[int, dict[Var, tuple[JaxprEqn, int]]] = {}
        self._readers: dict[int, dict[Var, list[JaxprEqn]]] = {}
        self._kept: list[Jaxpr] = []  # so that no id is given twice

    def maker(self, jaxpr: Jaxpr, var: Any) -> tuple[JaxprEqn, int] | None:
        """The equation that computes `var`, and its place among the outputs."""
        self._read(jaxpr)
        return None if isinstance(var, Literal) else self._makers[id(jaxpr)].get(var)

    def readers(self, jaxpr: Jaxpr, var: Any) -> list[JaxprEqn]:
        """The equations that take `var`, in order."""
        self._read(jaxpr)
        return [] if isinstance(var, Literal) else self._readers[id(jaxpr)].get(var, [])

    def _read(self, jaxpr: Jaxpr) -> None:
        if id(jaxpr) in self._makers:
            return
        self._kept.append(jaxpr)
        makers, readers = {}, {}
        for eqn in jaxpr.eqns:
            for place, var in enumerate(eqn.outvars):
                makers[var] = (eqn, place)
            for var in _distinct_vars(eqn.invars):
                readers.setdefault(var, []).append(eqn)
        self._makers[id(jaxpr)], self._readers[id(jaxpr)] = makers, readers


def _distinct_vars(operands: Sequence[Any]) -> list[Var]:
    return list(dict.fromkeys(x for x in operands if not isinstance(x, Literal)))
