"""When each buffer of a program is alive, in the order in which its operations run."""

from collections.abc import Sequence
from typing import NamedTuple

from ._buffers import Buffer, Span, Value
from ._fusion import Fused, fuse
from ._operations import Graph, Loop, Op
from ._order import run_order


class Stretch(NamedTuple):
    """The time of an operation."""

    where: str
    start: int
    end: int
    is_loop: bool


class Walk:
    """Runs a program without its numbers.

    Attributes:
        time: The present.
        buffers: All buffers but those of the program's arguments.
        stretches: The times of the outermost graph's operations.
        loops: The times of all loops.
    """

    def __init__(self, graph: Graph):
        self.time = 0
        self.buffers: list[Buffer] = []
        self.stretches: list[Stretch] = []
        self.loops: list[Stretch] = []
        given = [Value(Buffer(op.bytes, is_given=True), Span(0, 0)) for op in graph.given]
        for value in self.run(graph, given, outermost=True):
            home = value.home
            if home.is_given:  # an argument that is returned is copied
                home = self.new(home.size).home
            home.is_output = True

    def new(self, size: int, is_host: bool = False) -> Value:
        """A value in a new buffer, alive now."""
        buffer = Buffer(size, is_host=is_host)
        self.buffers.append(buffer)
        return self.again(buffer)

    def again(self, buffer: Buffer) -> Value:
        """A new value in an old buffer, alive now."""
        span = Span(self.time, self.time)
        buffer.root().spans.append(span)
        return Value(buffer.root(), span)

    def run(
        self,
        graph: Graph,
        given: Sequence[Value],
        loop: Loop | None = None,
        outermost: bool = False,
    ) -> list[Value]:
        """Runs a graph on the values that it is given, and returns its results."""
        fused = fuse(graph)
        copied = set() if loop is None else _copied(graph, loop, fused)
        order = run_order(graph, fused, copied, loop is not None)
        values = dict(zip(graph.given, given, strict=True))
        steps = _Steps(self, fused, values, _last_uses(graph, fused, order))
        self.time += 1
        for op in (op for op in graph.given if op in copied):
            values[op].span.end = self.time
            values[op] = self.new(op.bytes, op.is_host)
        for steps.place, op in enumerate(order):
            start = self.time
            steps.take(op)
            if outermost and op.kind != "part":
                self.stretches.append(Stretch(op.where, start, self.time, op.kind == "loop"))
        self.time += 1
        for op in graph.results:
            values[op].span.end = self.time
        return [values[op] for op in graph.results]


class _Steps:
    """The steps of one graph.

    Attributes:
        walk: What they are steps of.
        fused: The graph after fusion.
        values: What has been computed.
        last: The place in the order at which each value is read last.
        place: The place that has been reached.
    """

    def __init__(self, walk: Walk, fused: Fused, values: dict[Op, Value], last: dict[Op, int]):
        self.walk, self.fused, self.values, self.last = walk, fused, values, last
        self.place = -1

    def take(self, op: Op) -> None:
        """Runs one operation."""
        if op.kind == "part":
            if op.inputs[0].kind not in ("loop", "cond"):  # which made theirs
                self.values[op] = self.walk.new(op.bytes, op.is_host)
            return
        self.walk.time += 1
        runs = {"loop": self._loop, "cond": self._cond, "update": self._update}
        runs.get(op.kind, self._plain)(op)

    def _dies(self, op: Op) -> bool:
        """Whether this is the last that needs the value of `op`, which may be written over."""
        return self.last.get(op) == self.place and not self.values[op].home.is_given

    def _plain(self, op: Op) -> None:
        """A new value, which may be written over an input that dies and is read in place."""
        now, is_shared = self.walk.time, False
        for source, in_place in self.fused.reads[op]:
            shares = in_place and not is_shared and source.bytes == op.bytes and self._dies(source)
            self.values[source].keep(now - 0.5 if shares else now)
            is_shared |= shares
        self.values[op] = self.walk.new(op.bytes, op.is_host)

    def _update(self, op: Op) -> None:
        """Writes into a buffer that dies, or else into a copy of it."""
        target = op.inputs[0]
        for read in self.fused.reads[op]:
            self.values[read.source].keep(self.walk.time)
        is_last = self._dies(target)
        self.values[op] = self.values[target] if is_last else self.walk.new(op.bytes, op.is_host)

    def _loop(self, op: Op) -> None:
        walk, loop = self.walk, op.body
        start = walk.time
        invariants = [self.values[x] for x in op.inputs[: loop.invariants]]
        carry = self._carry(op.inputs[loop.invariants :], invariants)
        results = walk.run(loop.graph, [*(value.lend() for value in invariants), *carry], loop)
        walk.time += 1
        self._close(carry, results)
        walk.time += 1
        for value in invariants:
            value.keep(walk.time)
        outputs = [walk.again(value.buffer) for value in carry]
        walk.loops.append(Stretch(op.where, start, walk.time, True))
        for part in op.users:
            if part.kind == "part":
                self.values[part] = outputs[part.index]

    def _carry(self, inputs: Sequence[Op], invariants: Sequence[Value]) -> list[Value]:
        """The first carry: where its values are, or copies of those that are needed elsewhere."""
        taken = {value.home for value in invariants}
        carry = []
        for x in inputs:
            value = self.values[x]
            value.keep(self.walk.time)
            if self._dies(x) and value.home not in taken:
                taken.add(value.home)
                carry.append(self.walk.again(value.buffer))
            else:
                carry.append(self.walk.new(x.bytes, x.is_host))
        return carry

    def _close(self, carry: Sequence[Value], results: Sequence[Value]) -> None:
        """Brings a trip's results to where the next trip finds them, if need be by a copy."""
        homes = {value.home for value in carry}
        for value, result in zip(carry, results, strict=True):
            home, made = value.home, result.home
            result.span.end = self.walk.time
            if made is home:
                continue
            is_free = not made.is_given and made not in homes and made.size == home.size
            if is_free and not made.collides(home):
                home.merge(made)
            else:
                self.walk.again(home)
            homes.add(made)

    def _cond(self, op: Op) -> None:
        """One branch after the other, with outputs that live all the while."""
        walk, inputs = self.walk, [self.values[x] for x in op.inputs]
        start = walk.time
        for graph in op.body:
            walk.run(graph, [value.lend() for value in inputs])
        walk.time += 1
        for value in inputs:
            value.keep(walk.time)
        for part in op.users:
            if part.kind == "part":
                self.values[part] = walk.new(part.bytes, part.is_host)
                self.values[part].span.start = start


def _copied(graph: Graph, loop: Loop, fused: Fused) -> set[Op]:
    """The carries that a loop's body copies first, since they are read after the next is made.

    The compiler leaves the copy out only where every reader is known to come before the next
    carry, because the next carry depends on it.
    """
    readers: dict[Op, list[tuple[Op, bool]]] = {}
    for op, reads in fused.reads.items():
        for read in reads:
            readers.setdefault(read.source, []).append((op, read.in_place))
    copied = set()
    for op, result in zip(graph.given[loop.invariants :], graph.results, strict=True):
        if result is not op and op in readers:
            before = _ancestors(result, fused)
            if not all(_comes_before(result, op, *reader, before) for reader in readers[op]):
                copied.add(op)
    return copied


def _comes_before(result: Op, op: Op, reader: Op, in_place: bool, before: set[Op]) -> bool:
    if reader is result:
        return in_place or (reader.kind == "update" and reader.inputs[0] is op)
    return reader in before


def _ancestors(op: Op, fused: Fused) -> set[Op]:
    found: set[Op] = set()
    stack = [op]
    while stack:
        for read in fused.reads.get(stack.pop(), ()):
            if read.source not in found:
                found.add(read.source)
                stack.append(read.source)
    return found


def _last_uses(graph: Graph, fused: Fused, order: Sequence[Op]) -> dict[Op, int]:
    last = {read.source: i for i, op in enumerate(order) for read in fused.reads[op]}
    return last | dict.fromkeys(graph.results, len(order))
