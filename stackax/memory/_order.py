"""The order in which the compiler runs a program's operations.

The CPU compiler runs them breadth first: an operation is queued when the last of what it reads has
run. Which of several readers is queued first follows from the compiler's list of an output's
readers, which fusion reshuffles, and the peak depends on it: of two large values, the one that is
made first may have died when the second is made, or not.
"""

import heapq
from collections import deque

from ._fusion import Fused, reads_slices
from ._operations import Graph, Op


def run_order(graph: Graph, fused: Fused, copied: set[Op], is_body: bool) -> list[Op]:
    """The operations with a buffer, in the order in which they run.

    Args:
        graph: The graph.
        fused: What fusion made of it.
        copied: The carries that are copied before anything reads them.
        is_body: Whether the graph is a loop's.
    """
    users = _readers(graph, fused)
    counter = Op("counter", (), 0, ())  # what slices and writes of a loop's body wait for as well
    users[counter] = [
        op for op in fused.reads if reads_slices(op, fused) or (is_body and op.kind == "update")
    ]
    waits = {op: 0 for op in graph.ops if op in fused.reads or op in fused.alias}
    for source in (*graph.given, counter, *waits):
        for reader in users[source]:
            waits[reader] += 1
    queue = deque([*reversed(graph.given), *(op for op in waits if waits[op] == 0), counter])
    order: list[Op] = []
    delayed = set(copied)
    while queue:
        op = queue.popleft()
        if op in delayed:  # its readers wait for the copy
            delayed.remove(op)
            queue.append(op)
            continue
        if op in fused.reads:
            order.append(op)
        for reader in users[op]:
            waits[reader] -= 1
            if waits[reader] == 0:
                queue.append(reader)
    return _sources_first([*order, *fused.reads], fused)


def _sources_first(order: list[Op], fused: Fused) -> list[Op]:
    """The operations in this order, each once, but none before what it reads.

    The lists of readers are the compiler's but for what its other rewrites do to them; where they
    would run an operation too early, what it reads is made on the spot.
    """
    placed: dict[Op, None] = {}
    for op in order:
        stack = [op]
        while stack:
            waiting = [r.source for r in fused.reads[stack[-1]] if r.source in fused.reads]
            waiting = [source for source in waiting if source not in placed]
            if waiting:
                stack += reversed(waiting)
            else:
                placed[stack.pop()] = None
    return list(placed)


def _readers(graph: Graph, fused: Fused) -> dict[Op, list[Op]]:
    """The readers of each output after fusion, in the order of the compiler's lists.

    A fused operation takes its root's place in the lists; what it absorbs makes it a reader, at the
    list's end, of what that read; a reader that is gone leaves its place to the last one.
    """
    users: dict[Op, list[Op]] = {op: [] for op in graph.given}
    for op in graph.ops:
        users[op] = []
    # A transposed product is rewritten as the product of the transposes, which reads last.
    for op in sorted(graph.ops, key=_is_transposed_product):
        for x in dict.fromkeys(op.inputs):
            users[x].append(op)
    number = _post_order(graph)
    roots = sorted((op for op in fused.reads if fused.absorbed[op]), key=lambda op: -number[op])
    kernels = [op for op in fused.reads if op in fused.root_of and fused.absorbed[op]]
    for root in kernels + [op for op in roots if op not in fused.root_of]:
        _fuse_into(root, set(fused.absorbed[root]), users, number)
    return users


def _is_transposed_product(op: Op) -> bool:
    return op.kind == "product" and [x.where for x in op.users] == ["transpose"]


def _fuse_into(root: Op, inside: set[Op], users: dict[Op, list[Op]], number: dict[Op, int]) -> None:
    heap = [(-number[x], id(x), x) for x in set(root.inputs) if x in inside]
    heapq.heapify(heap)
    done: set[Op] = set()
    while heap:
        x = heapq.heappop(heap)[-1]
        if x in done:
            continue
        done.add(x)
        for y in dict.fromkeys(x.inputs):
            if root not in users[y]:
                users[y].append(root)
            if y in inside and y not in done:
                heapq.heappush(heap, (-number[y], id(y), y))
        _remove(users[x], root)
        if not users[x]:
            for y in dict.fromkeys(x.inputs):
                _remove(users[y], x)


def _remove(readers: list[Op], reader: Op) -> None:
    if reader in readers:
        place = readers.index(reader)
        readers[place] = readers[-1]
        readers.pop()


def _post_order(graph: Graph) -> dict[Op, int]:
    """Each operation's place in a walk from the results, operands first."""
    number: dict[Op, int] = {}
    stack = [(op, False) for op in graph.results]
    entered: set[Op] = set()
    while stack:
        op, is_done = stack.pop()
        if is_done:
            number[op] = len(number)
        elif op not in entered:
            entered.add(op)
            stack.append((op, True))
            stack += [(x, False) for x in reversed(op.inputs) if x not in entered]
    return number
