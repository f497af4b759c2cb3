"""When each buffer of a program is alive, in the order in which its operations run."""

from collections.abc import Sequence
from typing import NamedTuple

from ._fusion import FUSIBLE, Fused, fuse
from ._operations import Graph, Loop, Op


BACK = [False]


class Span:
    """A stretch of time, both ends included."""

    __slots__ = ("start", "end")

    def __init__(self, start: float, end: float):
        self.start, self.end = start, end


class Buffer:
    """Memory that holds one value after the other."""

    __slots__ = ("size", "spans", "is_output", "is_given", "is_host", "merged")

    def __init__(self, size: int, is_given: bool = False, is_host: bool = False):
        self.size = size
        self.spans: list[Span] = []
        self.is_output = False
        self.is_given = is_given
        self.is_host = is_host
        self.merged: Buffer | None = None

    def root(self) -> "Buffer":
        """The buffer that this one has become."""
        return self if self.merged is None else self.merged.root()

    def collides(self, other: "Buffer") -> bool:
        """Whether both are ever alive at once."""
        return any(
            a.start <= b.end and b.start <= a.end for a in self.spans for b in other.spans
        )


class Value(NamedTuple):
    """What an operation wrote: where, and how long it is needed."""

    buffer: Buffer
    span: Span


class Stretch(NamedTuple):
    """A top-level operation's time."""

    where: str
    start: float
    end: float
    is_loop: bool


class Walk:
    """Runs a program without its numbers.

    Attributes:
        buffers: All buffers.
        stretches: The times of the outermost graph's operations.
        loops: The times of all loops.
    """

    def __init__(self, graph: Graph):
        self.time = 0
        self.buffers: list[Buffer] = []
        self.stretches: list[Stretch] = []
        self.loops: list[Stretch] = []
        given = []
        for op in graph.given:
            given.append(Value(Buffer(op.bytes, is_given=True), Span(0, 0)))
        results = self.run(graph, given, outermost=True)
        for value in self._results(results):
            value.buffer.root().is_output = True

    def _results(self, results: Sequence[Value]) -> list[Value]:
        return [
            value if not value.buffer.root().is_given else self.new(value.buffer.size)
            for value in results
        ]

    def new(self, size: int, is_host: bool = False) -> Value:
        """A fresh buffer, alive now."""
        buffer = Buffer(size, is_host=is_host)
        span = Span(self.time, self.time)
        buffer.spans.append(span)
        self.buffers.append(buffer)
        return Value(buffer, span)

    def again(self, buffer: Buffer) -> Value:
        """A new value in an old buffer, alive now."""
        buffer = buffer.root()
        span = Span(self.time, self.time)
        buffer.spans.append(span)
        return Value(buffer, span)

    def merge(self, into: Buffer, other: Buffer) -> None:
        """Makes two buffers one."""
        into, other = into.root(), other.root()
        into.spans += other.spans
        other.spans = []
        other.merged = into

    def run(
        self, graph: Graph, given: Sequence[Value], loop: Loop | None = None, outermost: bool = False
    ) -> list[Value]:
        """Runs a graph, and returns its results."""
        fused = fuse(graph)
        copied = _copied(graph, loop, fused)
        order = schedule(graph, fused, loop, copied)
        last = _last_uses(graph, fused, order)
        values: dict[Op, Value] = dict(zip(graph.given, given, strict=True))
        self.time += 1
        for op in graph.given:
            if op in copied:
                values[op].span.end = self.time
                values[op] = self.new(op.bytes, op.is_host)
        for place, op in enumerate(order):
            start = self.time
            self._step(op, fused, values, last, place)
            if outermost and op.kind != "part":
                self.stretches.append(Stretch(op.where, start, self.time, op.kind == "loop"))
        self.time += 1
        for op in graph.results:
            values[op].span.end = self.time
        return [values[op] for op in graph.results]

    def _step(self, op: Op, fused: Fused, values: dict[Op, Value], last: dict[Op, int], place: int):
        if op.kind == "part":
            source = op.inputs[0]
            if source.kind not in ("loop", "cond"):
                values[op] = self.new(op.bytes, op.is_host)
            return
        self.time += 1
        if op.kind == "loop":
            self._loop(op, values, last, place)
        elif op.kind == "cond":
            self._cond(op, values)
        elif op.kind == "update":
            self._update(op, fused, values, last, place)
        else:
            self._plain(op, fused, values, last, place)

    def _plain(self, op, fused, values, last, place) -> None:
        out = self.new(op.bytes, op.is_host)
        shared = False
        for read in fused.reads[op]:
            value = values[read.source]
            end: float = self.time
            dies = last.get(read.source) == place and not value.buffer.root().is_given
            if read.in_place and dies and not shared and read.source.bytes == op.bytes:
                end, shared = self.time - 0.5, True
            value.span.end = max(value.span.end, end)
        values[op] = out

    def _update(self, op, fused, values, last, place) -> None:
        target = op.inputs[0]
        value = values[target]
        for read in fused.reads[op]:
            if read.source is not target:
                values[read.source].span.end = max(values[read.source].span.end, self.time)
        if last.get(target) == place and not value.buffer.root().is_given:
            value.span.end = self.time
            values[op] = Value(value.buffer, value.span)
        else:
            value.span.end = max(value.span.end, self.time)
            values[op] = self.new(op.bytes, op.is_host)

    def _loop(self, op: Op, values: dict[Op, Value], last: dict[Op, int], place: int) -> None:
        loop: Loop = op.body
        start = self.time
        carry: list[Value] = []
        taken: set[int] = set()
        invariants = [values[x] for x in op.inputs[: loop.invariants]]
        borrowed = {id(v.buffer.root()) for v in invariants}
        for x in op.inputs[loop.invariants :]:
            value = values[x]
            root = value.buffer.root()
            value.span.end = max(value.span.end, self.time)
            free = last.get(x) == place and id(root) not in taken and id(root) not in borrowed
            if free and not root.is_given:
                taken.add(id(root))
                carry.append(self.again(root))
            else:
                carry.append(self.new(x.bytes, x.is_host))
        given = [Value(_Lent(v.buffer), v.span) for v in invariants] + carry
        results = self.run(loop.graph, given, loop)
        self.time += 1
        self._close(loop, carry, results)
        self.time += 1
        for value in invariants:
            value.span.end = max(value.span.end, self.time)
        outputs = [self.again(value.buffer) for value in carry]
        self.loops.append(Stretch(op.where, start, self.time, True))
        for part in op.users:
            if part.kind == "part":
                values[part] = outputs[part.index]

    def _close(self, loop: Loop, carry: Sequence[Value], results: Sequence[Value]) -> None:
        """Brings the results of a trip to where the next one finds them."""
        done: set[int] = set()
        for value, result in zip(carry, results, strict=True):
            home, made = value.buffer.root(), result.buffer.root()
            result.span.end = self.time
            if made is home:
                continue
            mine = not made.is_given and id(made) not in done and made.size == home.size
            mine = mine and not any(made is other.buffer.root() for other in carry)
            if mine and not made.collides(home):
                self.merge(home, made)
            else:
                home.spans.append(Span(self.time, self.time))
            done.add(id(made))

    def _cond(self, op: Op, values: dict[Op, Value]) -> None:
        inputs = [values[x] for x in op.inputs]
        start = self.time
        ends = []
        outputs: list[Value] | None = None
        for graph in op.body:
            given = [Value(_Lent(v.buffer), v.span) for v in inputs]
            results = self.run(graph, given)
            ends.append(self.time)
            if outputs is None:
                outputs = [self.new(v.buffer.size) for v in results]
        self.time += 1
        for value in inputs:
            value.span.end = max(value.span.end, self.time)
        for part in op.users:
            if part.kind == "part" and outputs is not None:
                outputs[part.index].span.start = start
                outputs[part.index].span.end = self.time
                values[part] = outputs[part.index]


def _Lent(buffer: Buffer) -> Buffer:
    """A buffer that the graph it is lent to may read only."""
    lent = Buffer(buffer.size, is_given=True)
    return lent


def _copied(graph: Graph, loop: Loop | None, fused: Fused) -> set[Op]:
    """The carries that a loop's body copies first, since they are read after the next is made.

    The compiler leaves the copy out only where every reader is known to come before the next
    carry, because the next carry depends on it.
    """
    if loop is None:
        return set()
    readers: dict[Op, list[tuple[Op, bool]]] = {}
    for op in fused.stays:
        for read in fused.reads[op]:
            readers.setdefault(read.source, []).append((op, read.in_place))
    copied = set()
    for op, result in zip(graph.given[loop.invariants :], graph.results, strict=True):
        if result is op or op not in readers:
            continue
        before = _ancestors(result, fused)
        for reader, in_place in readers[op]:
            if reader is result:
                fine = in_place or (reader.kind == "update" and reader.inputs[0] is op)
            else:
                fine = reader in before
            if not fine:
                copied.add(op)
                break
    return copied


def _ancestors(op: Op, fused: Fused) -> set[Op]:
    found: set[Op] = set()
    stack = [op]
    while stack:
        for read in fused.reads.get(stack.pop(), ()):
            if read.source not in found:
                found.add(read.source)
                stack.append(read.source)
    return found


def schedule(graph: Graph, fused: Fused, loop: Loop | None, copied: set[Op]) -> list[Op]:
    """The order in which operations run: breadth first, as soon as what they read is there."""
    level: dict[Op, int] = {}
    for op in graph.given:
        level[op] = 2 if op in copied else 1
    levels: dict[int, list[Op]] = {}
    number = {op: i for i, op in enumerate(fused.stays)}
    for op in fused.stays:
        own = 1 + max((level[read.source] for read in fused.reads[op]), default=0)
        if op in fused.sliced or op.where == "output of the scan":
            own = max(own, 3)
        level[op] = own
        levels.setdefault(own, []).append(op)
    position: dict[Op, int] = {}
    order: list[Op] = []
    for key in sorted(levels):
        def rank(op: Op) -> tuple[int, int]:
            return (
                max((position.get(read.source, -1) for read in fused.reads[op]), default=-1),
                -number[op] if op.kind in FUSIBLE and BACK[0] else number[op],
            )

        for op in sorted(levels[key], key=rank):
            position[op] = len(order)
            order.append(op)
    return order


def _last_uses(graph: Graph, fused: Fused, order: list[Op]) -> dict[Op, int]:
    last: dict[Op, int] = {}
    for place, op in enumerate(order):
        for read in fused.reads[op]:
            last[read.source] = place
    for op in graph.results:
        last[op] = len(order)
    return last
