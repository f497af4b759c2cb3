"""A program as a graph of operations, in the form that the compiler works on.

What an operation's `kind` can be:

| kind | meaning |
|---|---|
| `given` | a parameter of the graph |
| `cheap` | computed entry by entry, so cheaply that each reader may compute it again |
| `costly` | computed entry by entry |
| `spread` | a broadcast or an iota, of which no entry needs memory |
| `move` | each entry is read from somewhere else: transpose, slice, pad, gather |
| `same` | a reshape: the same numbers in the same order |
| `join` | a concatenation |
| `update` | a part of its first input is written, if possible in place |
| `reduce` | a reduction |
| `product` | a matrix product |
| `loop`, `cond` | an operation with graphs of its own |
| `part` | one of the outputs of an operation with several |
| `fence` | its first input, which nothing is fused or merged across |
| `opaque` | anything else |
"""

import math
from collections.abc import Sequence
from typing import Any

ELEMENTWISE = frozenset(("cheap", "costly"))
FUSIBLE = frozenset(("cheap", "costly", "spread", "move", "same"))

# What a loop's body does of itself, beside the equations that were traced.
SLICE = "slice of the scan's input"
WRITE = "output of the scan"


class Op:
    """One operation, and its output.

    Attributes:
        kind: Of which kind it is.
        shape, bytes: Its output's.
        inputs, users: What it reads, and what reads it.
        where: The primitive that it comes from.
        is_host: Whether its output is in the host's memory.
        is_unary: Whether it depends on one large input at most.
        body: The `Loop` of a loop, the graphs of a cond.
        index: Of a part: which output it is.
        is_live: Whether a result depends on it.
    """

    __slots__ = (
        "kind",
        "shape",
        "bytes",
        "inputs",
        "users",
        "where",
        "is_host",
        "is_unary",
        "body",
        "index",
        "is_live",
    )

    def __init__(
        self,
        kind: str,
        shape: Sequence[int],
        size: int,
        inputs: Sequence["Op"],
        where: str = "",
        is_unary: bool = False,
    ):
        self.kind = kind
        self.shape = tuple(shape)
        self.bytes = size
        self.inputs = list(inputs)
        self.users: list[Op] = []
        self.where = where
        self.is_host = False
        self.is_unary = is_unary
        self.body: Any = None
        self.index = 0
        self.is_live = False

    @property
    def itemsize(self) -> int:
        """The bytes of one entry."""
        return self.bytes // max(1, math.prod(self.shape))


class Graph:
    """Operations in program order.

    Attributes:
        given: The parameters.
        ops: The operations.
        results: Which of either are the results.
        known: Operations by what they compute, so that none is there twice.
    """

    def __init__(self):
        self.given: list[Op] = []
        self.ops: list[Op] = []
        self.results: list[Op] = []
        self.known: dict[Any, Op] = {}


class Loop:
    """What a loop repeats.

    The graph is given first the invariants, then the carry; its results are the next carry. The
    buffers that gather a scan's outputs are part of the carry.
    """

    def __init__(self, graph: Graph, invariants: int):
        self.graph = graph
        self.invariants = invariants
        self.places: dict[int, int] = {}  # of the carry, after pruning
