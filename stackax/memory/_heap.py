"""Packing buffers into one stretch of memory, as the compiler does."""

from collections.abc import Callable, Sequence

from ._buffers import Buffer


def packed_bytes(buffers: Sequence[Buffer]) -> int:
    """The bytes that buffers take together: the better of two orders of placing them.

    Each buffer goes to the smallest gap, between those placed already and alive at the same time,
    that it fits into.
    """
    orders: tuple[Callable[[Buffer], tuple], ...] = (
        lambda b: (-b.size, -_length(b)),
        lambda b: (-_length(b), -b.size),
    )
    return min(_place(sorted(buffers, key=order)) for order in orders)


def _length(buffer: Buffer) -> float:
    return max(s.end for s in buffer.spans) - min(s.start for s in buffer.spans)


def _place(buffers: Sequence[Buffer]) -> int:
    placed: list[tuple[int, int, Buffer]] = []
    top = 0
    for buffer in buffers:
        taken = sorted((start, end) for start, end, other in placed if buffer.collides(other))
        offset = _best_gap(taken, buffer.size)
        placed.append((offset, offset + buffer.size, buffer))
        top = max(top, offset + buffer.size)
    return top


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    best, best_gap, free = -1, 0, 0
    for start, end in taken:
        gap = start - free
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = free, gap
        free = max(free, end)
    return best if best >= 0 else free
