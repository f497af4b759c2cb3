"""Memory that values are kept in, and when."""

from typing import NamedTuple


class Span:
    """A stretch of time, both ends included."""

    __slots__ = ("start", "end")

    def __init__(self, start: float, end: float):
        self.start, self.end = start, end


class Buffer:
    """Memory that holds one value after the other.

    Attributes:
        size: Its bytes.
        spans: When it is in use.
        is_output, is_given: Whether it is the program's output, or was there before.
        is_host: Whether it is in the host's memory.
    """

    __slots__ = ("size", "spans", "is_output", "is_given", "is_host", "_became")

    def __init__(self, size: int, is_given: bool = False, is_host: bool = False):
        self.size = size
        self.spans: list[Span] = []
        self.is_output = False
        self.is_given = is_given
        self.is_host = is_host
        self._became: Buffer | None = None

    def root(self) -> "Buffer":
        """The buffer that this one has become."""
        return self if self._became is None else self._became.root()

    def merge(self, other: "Buffer") -> None:
        """Makes another buffer part of this one."""
        self.spans += other.spans
        other.spans = []
        other._became = self

    def collides(self, other: "Buffer") -> bool:
        """Whether both are ever alive at once."""
        if len(self.spans) == len(other.spans) == 1:  # which is most often so
            (a,), (b,) = self.spans, other.spans
            return a.start <= b.end and b.start <= a.end
        return any(a.start <= b.end and b.start <= a.end for a in self.spans for b in other.spans)


class Value(NamedTuple):
    """What an operation wrote: where, and how long it is needed."""

    buffer: Buffer
    span: Span

    @property
    def home(self) -> Buffer:
        """The buffer that it is in by now."""
        return self.buffer.root()

    def keep(self, time: float) -> None:
        """Needs it until `time`."""
        self.span.end = max(self.span.end, time)

    def lend(self) -> "Value":
        """The same for a graph that may not write to it."""
        return Value(Buffer(self.buffer.size, is_given=True), self.span)
