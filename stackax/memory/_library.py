"""Reductions and what a library's kernel takes in beside them.

A kernel takes in the elementwise operations and matrix products before a reduction, and the
elementwise operations after it, as long as nothing outside reads what is inside. Nothing inside
needs a buffer, nothing is computed twice, and all its inputs are in memory.
"""

from collections.abc import Iterator

from ._backend import has_library, library_computes
from ._operations import Graph, Op


def kernels(graph: Graph) -> dict[Op, Op]:
    """For each operation inside a kernel the one whose output the kernel writes."""
    root_of: dict[Op, Op] = {}
    if not has_library():
        return root_of
    results = frozenset(map(id, graph.results))
    for anchor in graph.ops:
        if anchor.kind == "reduce" and anchor not in root_of:
            inside, root = _grow(anchor, root_of, results)
            root_of.update(dict.fromkeys(inside, root))
    return root_of


def _grow(anchor: Op, taken: dict[Op, Op], results: frozenset[int]) -> tuple[set[Op], Op]:
    inside, root = {anchor}, anchor
    while True:
        above = list(_above(inside, taken, results))
        below = _below(root, inside, taken, results)
        if below is not None:
            inside.add(below)
            root = below
        elif not above:
            return inside, root


def _above(inside: set[Op], taken: dict[Op, Op], results: frozenset[int]) -> Iterator[Op]:
    """Adds what is read inside alone."""
    stack = list(inside)
    while stack:
        for x in stack.pop().inputs:
            is_free = x not in inside and x not in taken and id(x) not in results
            if is_free and (x.kind == "product" or library_computes(x)):
                if all(user in inside for user in x.users):
                    inside.add(x)
                    stack.append(x)
                    yield x


def _below(root: Op, inside: set[Op], taken: dict[Op, Op], results: frozenset[int]) -> Op | None:
    """The only reader of the output, if it can be taken in."""
    users = {user for user in root.users if user not in inside}
    if len(users) != 1 or id(root) in results:
        return None
    user = users.pop()
    return user if user not in taken and library_computes(user) else None
