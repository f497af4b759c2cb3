"""Which operations get a buffer, and which are computed inside those that read them."""

from typing import NamedTuple

from ._operations import Graph, Op

ELEMENTWISE = frozenset(("cheap", "costly"))
FUSIBLE = frozenset(("cheap", "costly", "spread", "move", "same"))
READS_FUSED = frozenset(("cheap", "costly", "spread", "move", "update", "same"))


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
    regions = _regions(graph, results)
    for op in reversed(graph.ops):
        if op in regions:
            # Inside a library's kernel nothing is computed twice, and its inputs are in memory.
            root = regions[op]
            stays[op] = op is root
            roots[op] = frozenset((root,))
            continue
        within = [user for user in op.users if user not in regions and absorbs(user, op)]
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
    alias = _aliases(graph, stays, again, regions)
    reads, sliced = {}, set()
    kept = [op for op in graph.ops if stays[op] and op not in alias]
    for op in kept:
        reads[op], slices = _gather(op, stays, again, regions, alias)
        if slices:
            sliced.add(op)
    return Fused(kept, reads, sliced)


LIBRARY = frozenset(
    "add sub mul neg max min abs exp div integer_pow square add_any ceil floor sign sqrt "
    "convert_element_type tanh log".split()
)


def _regions(graph: Graph, results: set[int]) -> dict[Op, Op]:
    """The kernels of the CPU's library: reductions, with what is around them.

    They take in the elementwise operations before a reduction and after it, and a matrix product
    before it, as long as nothing else reads what is inside.
    """
    regions: dict[Op, Op] = {}
    for anchor in graph.ops:
        if anchor.kind != "reduce" or anchor in regions:
            continue
        inside = {anchor}
        root = anchor
        while True:
            grown = _grow_up(inside, regions, results)
            below = _below(root, inside, regions, results)
            if below is not None:
                inside.add(below)
                root = below
            elif not grown:
                break
        for op in inside:
            regions[op] = root
    return regions


def _aliases(graph: Graph, stays, again, regions) -> dict[Op, Op]:
    """What is nothing but another operation's output under a new shape."""
    alias: dict[Op, Op] = {}
    for op in graph.ops:
        if op.kind == "fence" or (op.kind == "same" and stays[op]):
            x = op.inputs[0]
            if op.kind == "same":
                through = regions.get(x) is regions[op] if op in regions else (
                    absorbs(op, x) and (not stays.get(x, True) or x in again)
                )
                if through:
                    continue
            alias[op] = alias.get(x, x)
    graph.results = [alias.get(op, op) for op in graph.results]
    for op in graph.ops:
        if op.kind in ("loop", "cond", "update"):
            op.inputs = [alias.get(x, x) for x in op.inputs]
    return alias


def _supported(op: Op) -> bool:
    if op.kind == "same":
        return True
    if op.kind == "spread":
        return len(op.inputs) == 1
    return op.kind in ELEMENTWISE and op.where in LIBRARY


def _grow_up(inside: set[Op], regions: dict[Op, Op], results: set[int]) -> bool:
    grown = False
    stack = list(inside)
    while stack:
        op = stack.pop()
        for x in op.inputs:
            if x in inside or x in regions or id(x) in results:
                continue
            if not (_supported(x) or x.kind == "product"):
                continue
            if all(user in inside for user in x.users):
                inside.add(x)
                if x.kind != "product":
                    stack.append(x)
                grown = True
    return grown


def _below(root: Op, inside: set[Op], regions: dict[Op, Op], results: set[int]) -> Op | None:
    users = [user for user in root.users if user not in inside]
    if len(set(users)) != 1 or id(root) in results:
        return None
    user = users[0]
    if user in regions or not _supported(user):
        return None
    if any(x.kind == "spread" and not x.inputs for x in user.inputs):
        return None
    return user


def absorbs(user: Op, op: Op) -> bool:
    """Whether `user` can compute `op` for itself."""
    if op.kind not in FUSIBLE:
        return False
    if user.kind == "update":
        return user.inputs[0] is not op
    if user.kind == "reduce":
        return op.kind in ELEMENTWISE or op.kind in ("spread", "same")
    return user.kind in READS_FUSED


def _repeats(user: Op, op: Op) -> bool:
    return user.kind == "spread" and user.bytes > op.bytes


def _gather(root: Op, stays: dict[Op, bool], again: set[Op], regions: dict[Op, Op], alias: dict[Op, Op]) -> tuple[list[Read], bool]:
    found: dict[Op, bool] = {}
    slices = False
    seen: dict[Op, bool] = {}
    stack = [(root, root.kind in ELEMENTWISE or root.kind == "same")]
    if root.where == SLICE:
        slices = True
    while stack:
        op, in_place = stack.pop()
        for x in op.inputs:
            if op in regions:
                through = regions.get(x) is regions[op]
            else:
                through = absorbs(op, x) and (not stays.get(x, True) or x in again)
            same = in_place and x.bytes == root.bytes
            if not through:
                x = alias.get(x, x)
                found[x] = found.get(x, True) and same
                continue
            same = same and (x.kind in ELEMENTWISE or x.kind == "same")
            if x in seen and (seen[x] is same or not seen[x]):
                continue
            seen[x] = same
            slices = slices or x.where == SLICE
            stack.append((x, same))
    return [Read(x, same) for x, same in found.items()], slices


SLICE = "slice of the scan's input"
