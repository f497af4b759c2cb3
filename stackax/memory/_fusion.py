"""Which operations get a buffer, and which are computed inside those that read them."""

from typing import NamedTuple

from ._operations import Graph, Op

ELEMENTWISE = frozenset(("cheap", "costly"))
FUSIBLE = frozenset(("cheap", "costly", "spread", "move"))
READS_FUSED = frozenset(("cheap", "costly", "spread", "move", "update"))


class Read(NamedTuple):
    """A buffer that an operation reads.

    Attributes:
        source: The operation whose output it is.
        in_place: Whether each element of it is read where the reader's own element is written.
    """

    source: Op
    in_place: bool


class Fused(NamedTuple):
    """A graph after fusion.

    Attributes:
        stays: The operations with an output of their own, in program order.
        reads: What each of them reads.
        sliced: Those that read a slice of a scan's input.
    """

    stays: list[Op]
    reads: dict[Op, list[Read]]
    sliced: set[Op]


def fuse(graph: Graph) -> Fused:
    """Decides for each operation of a graph whether its output is written to memory."""
    results = set(map(id, graph.results))
    stays: dict[Op, bool] = {}
    again: set[Op] = set()  # has a buffer, and is computed again by readers that can
    roots: dict[Op, frozenset[Op]] = {}
    for op in reversed(graph.ops):
        within = [user for user in op.users if absorbs(user, op)]
        outside = len(within) < len(op.users) or id(op) in results
        reached = frozenset().union(*(roots[user] for user in within)) if within else frozenset()
        if op.kind not in FUSIBLE:
            stays[op] = True
        elif op.kind == "costly":
            stays[op] = outside or len(reached) > 1 or any(_repeats(user, op) for user in within)
        elif outside:
            stays[op] = True
            if op.is_unary and within:
                again.add(op)
        else:
            stays[op] = False
        if op in again:
            roots[op] = reached | {op}
        else:
            roots[op] = frozenset((op,)) if stays[op] else reached
    reads, sliced = {}, set()
    kept = [op for op in graph.ops if stays[op]]
    for op in kept:
        reads[op], slices = _gather(op, stays, again)
        if slices:
            sliced.add(op)
    return Fused(kept, reads, sliced)


def absorbs(user: Op, op: Op) -> bool:
    """Whether `user` can compute `op` for itself."""
    if op.kind not in FUSIBLE:
        return False
    if user.kind == "update":
        return user.inputs[0] is not op
    if user.kind == "reduce":
        return op.kind in ELEMENTWISE or op.kind == "spread"
    return user.kind in READS_FUSED


def _repeats(user: Op, op: Op) -> bool:
    return user.kind == "spread" and user.bytes > op.bytes


def _gather(root: Op, stays: dict[Op, bool], again: set[Op]) -> tuple[list[Read], bool]:
    found: dict[Op, bool] = {}
    slices = False
    seen: dict[Op, bool] = {}
    stack = [(root, root.kind in ELEMENTWISE)]
    if root.where == SLICE:
        slices = True
    while stack:
        op, in_place = stack.pop()
        for x in op.inputs:
            through = absorbs(op, x) and (not stays.get(x, True) or x in again)
            same = in_place and x.bytes == root.bytes
            if not through:
                found[x] = found.get(x, True) and same
                continue
            same = same and x.kind in ELEMENTWISE
            if x in seen and (seen[x] is same or not seen[x]):
                continue
            seen[x] = same
            slices = slices or x.where == SLICE
            stack.append((x, same))
    return [Read(x, same) for x, same in found.items()], slices


SLICE = "slice of the scan's input"
