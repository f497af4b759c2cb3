"""Leaving out what no result depends on, as the compiler does."""

from collections.abc import Sequence

from ._operations import Graph, Loop, Op


def prune(graph: Graph) -> None:
    """Removes what no result depends on, and notes who reads what is left."""
    _mark(graph.results)
    _sweep(graph)


def _mark(ops: Sequence[Op]) -> None:
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op.is_live:
            continue
        op.is_live = True
        source = op.inputs[0] if op.kind == "part" else None
        if source is not None and source.kind == "loop":
            stack += _needed_for(source, op.index)
        else:
            stack += op.inputs
        if op.kind == "cond":
            for graph in op.body:
                _mark(graph.results)


def _needed_for(op: Op, index: int) -> list[Op]:
    """The inputs of a loop that one of its outputs needs: all of the carry that feeds into it."""
    op.is_live = True
    loop: Loop = op.body
    carry = loop.graph.given[loop.invariants :]
    carry[index].is_live = True
    wanted: set[int] = set()
    while True:
        more = {i for i, given in enumerate(carry) if given.is_live} - wanted
        if not more:
            break
        wanted |= more
        _mark([loop.graph.results[i] for i in more])
    return _kept(op.inputs, [given.is_live for given in loop.graph.given])


def _sweep(graph: Graph) -> None:
    graph.ops = [op for op in graph.ops if op.is_live]
    for op in graph.ops:
        if op.kind == "loop":
            _sweep_loop(op)
        elif op.kind == "cond":
            for branch in op.body:
                _sweep(branch)
    for op in graph.ops:
        if op.kind == "part" and op.inputs[0].kind == "loop":
            op.index = op.inputs[0].body.places[op.index]
        for x in op.inputs:
            x.users.append(op)


def _sweep_loop(op: Op) -> None:
    loop: Loop = op.body
    keep = [given.is_live for given in loop.graph.given]
    carries = keep[loop.invariants :]
    op.inputs = _kept(op.inputs, keep)
    loop.graph.given = _kept(loop.graph.given, keep)
    loop.graph.results = _kept(loop.graph.results, carries)
    loop.invariants -= keep[: loop.invariants].count(False)
    left = [i for i, is_kept in enumerate(carries) if is_kept]
    loop.places = {old: new for new, old in enumerate(left)}
    _sweep(loop.graph)


def _kept(ops: Sequence[Op], keep: Sequence[bool]) -> list[Op]:
    return [op for op, is_kept in zip(ops, keep, strict=True) if is_kept]
