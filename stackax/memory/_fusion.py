"""Which operations get a buffer, and which are computed inside those that read them."""

from typing import NamedTuple

from ._backend import is_computed_once
from ._library import kernels
from ._operations import ELEMENTWISE, FUSIBLE, SLICE, Graph, Op


class Read(NamedTuple):
    """A buffer that an operation reads.

    Attributes:
        source: The operation whose output it is.
        in_place: Whether each entry of it is read where the reader's own entry is written.
    """

    source: Op
    in_place: bool


class Fused(NamedTuple):
    """A graph after fusion.

    Attributes:
        reads: For each operation with a buffer, in program order, the buffers that it reads.
        absorbed: For each of them the operations that it computes for itself.
        alias: Operations that are another one's output under a new shape, and that one.
        root_of: The operations inside a library's kernels, and their kernel's output.
    """

    reads: dict[Op, list[Read]]
    absorbed: dict[Op, list[Op]]
    alias: dict[Op, Op]
    root_of: dict[Op, Op]


def fuse(graph: Graph) -> Fused:
    """Decides for each operation of a graph whether its output is written to memory."""
    fusion = _Fusion(graph)
    for op in reversed(graph.ops):
        fusion.decide(op)
    alias = fusion.aliases()
    graph.results = [alias.get(op, op) for op in graph.results]
    for op in graph.ops:
        if op.kind in ("loop", "cond", "update"):
            op.inputs = [alias.get(x, x) for x in op.inputs]
    reads, absorbed = {}, {}
    for op in graph.ops:
        if fusion.stays[op] and op not in alias:
            reads[op], absorbed[op] = fusion.gather(op, alias)
    return Fused(reads, absorbed, alias, fusion.root_of)


def reads_slices(op: Op, fused: Fused) -> bool:
    """Whether an operation slices a scan's inputs, for itself or for what it absorbs."""
    return op.where == SLICE or any(x.where == SLICE for x in fused.absorbed[op])


class _Fusion:
    """Decides from the last operation to the first.

    Attributes:
        stays: Whether an operation has a buffer, or is an alias of one.
        again: Those that have one, and are computed again by each reader that can.
        readers: For each operation those with a buffer that compute it or read it.
        root_of: The operations inside a library's kernels.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.results = frozenset(map(id, graph.results))
        self.root_of = kernels(graph)
        self.stays: dict[Op, bool] = {}
        self.again: set[Op] = set()
        self.readers: dict[Op, frozenset[Op]] = {}

    def decide(self, op: Op) -> None:
        """Whether `op` stays."""
        if op in self.root_of:
            self.stays[op] = op is self.root_of[op]
            self.readers[op] = frozenset((self.root_of[op],))
            return
        within = [user for user in op.users if user not in self.root_of and absorbs(user, op)]
        is_needed = len(within) < len(op.users) or id(op) in self.results
        readers = frozenset().union(*(self.readers[user] for user in within))
        self.stays[op] = is_needed or op.kind not in FUSIBLE
        if is_computed_once(op):
            repeats = any(user.kind == "spread" and user.bytes > op.bytes for user in within)
            self.stays[op] |= len(readers) > 1 or repeats
        elif op.kind in FUSIBLE and is_needed and op.is_unary and within:
            # Of several large inputs one buffer is made; of one, each reader makes its own.
            self.again.add(op)
        if op in self.again:
            readers |= {op}
        elif self.stays[op]:
            readers = frozenset((op,))
        self.readers[op] = readers

    def is_inside(self, op: Op, x: Op) -> bool:
        """Whether `op` computes its input `x` for itself."""
        if op in self.root_of:
            return self.root_of.get(x) is self.root_of[op]
        return absorbs(op, x) and (not self.stays.get(x, True) or x in self.again)

    def aliases(self) -> dict[Op, Op]:
        """What is another operation's output: barriers, and reshapes of what is in memory."""
        alias: dict[Op, Op] = {}
        for op in self.graph.ops:
            is_reshape = op.kind == "same" and self.stays[op]
            if op.kind == "fence" or (is_reshape and not self.is_inside(op, op.inputs[0])):
                alias[op] = alias.get(op.inputs[0], op.inputs[0])
        return alias

    def gather(self, root: Op, alias: dict[Op, Op]) -> tuple[list[Read], list[Op]]:
        """The buffers that `root` reads, and what it computes for itself on the way."""
        found: dict[Op, bool] = {}
        absorbed: dict[Op, bool] = {}
        stack = [(root, _keeps_places(root))]
        while stack:
            op, in_place = stack.pop()
            for x in op.inputs:
                same = in_place and x.bytes == root.bytes
                if not self.is_inside(op, x):
                    x = alias.get(x, x)
                    found[x] = found.get(x, True) and same
                    continue
                same = same and _keeps_places(x)
                # Once more only if it is now known to be read out of place.
                if x not in absorbed or (absorbed[x] and not same):
                    absorbed[x] = same
                    stack.append((x, same))
        return [Read(x, same) for x, same in found.items()], list(absorbed)


def absorbs(user: Op, op: Op) -> bool:
    """Whether `user` can compute its input `op` for itself, entry by entry."""
    if op.kind not in FUSIBLE:
        return False
    if user.kind == "update":
        return user.inputs[0] is not op
    if user.kind == "reduce":
        return op.kind != "move"
    return user.kind in FUSIBLE


def _keeps_places(op: Op) -> bool:
    return op.kind in ELEMENTWISE or op.kind == "same"
