"""The peak of a traced program's temporary memory, estimated without compiling it."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr

from ._heap import packed_bytes
from ._liveness import Buffer, Stretch, Walk
from ._operations import bytes_of, graph_of, is_host


class Moment(NamedTuple):
    """A point of a step.

    Attributes:
        where: What runs there.
        live_bytes: The temporary bytes that are alive.
    """

    where: str
    live_bytes: int


class Peak(NamedTuple):
    """What a program needs beside its arguments and outputs, and when.

    Attributes:
        temp_bytes: The estimate of the compiler's `temp_size_in_bytes`.
        low_bytes, high_bytes: The band in which the compiler's figure is expected.
        argument_bytes, output_bytes: What goes in and comes out.
        host_bytes: Values placed in the host's memory, which `temp_bytes` does not count.
        timeline: Live temporary bytes in program order.
        working_bytes: What the most demanding loop body needs beyond what lives outside of it.
    """

    temp_bytes: int
    low_bytes: int
    high_bytes: int
    argument_bytes: int
    output_bytes: int
    host_bytes: int
    timeline: tuple[Moment, ...]
    working_bytes: int


def estimate_peak(closed_jaxpr: ClosedJaxpr) -> Peak:
    """Estimates the temporary memory of a program, jitted without donation, from its trace.

    Args:
        closed_jaxpr: The program, such as `jax.make_jaxpr(jax.value_and_grad(f))(*args)`.

    Returns:
        The estimate.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from stackax.memory._peak import estimate_peak
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> estimate_peak(jax.make_jaxpr(lambda x: jnp.tanh(x @ x) @ x)(x)).temp_bytes
        262144
    """
    jaxpr = closed_jaxpr.jaxpr
    walk = Walk(graph_of(closed_jaxpr))
    outputs = [b for b in walk.buffers if b.is_output and not b.is_host]
    temps = [b for b in walk.buffers if not b.is_output and b.spans and b.size and not b.is_host]
    temps = _scratch_in_outputs(temps, outputs)
    live = _live(temps, walk.time)
    peak = packed_bytes(temps)
    floor = max(live, default=0)
    return Peak(
        temp_bytes=peak,
        low_bytes=int(0.9 * floor),
        high_bytes=int(1.1 * peak),
        argument_bytes=sum(bytes_of(var.aval) for var in jaxpr.invars),
        output_bytes=sum(bytes_of(atom.aval) for atom in jaxpr.outvars),
        host_bytes=sum(b.size for b in walk.buffers if b.is_host),
        timeline=tuple(_timeline(walk.stretches, live)),
        working_bytes=max((_working(loop, live) for loop in walk.loops), default=0),
    )


def _scratch_in_outputs(temps: list[Buffer], outputs: list[Buffer]) -> list[Buffer]:
    """The buffers that find no room in an output's, before it is written."""
    rooms = [(room, [room]) for room in sorted(outputs, key=lambda b: b.size)]
    left = []
    for buffer in sorted(temps, key=lambda b: -b.size):
        for room, tenants in rooms:
            if room.size >= buffer.size and not any(buffer.collides(t) for t in tenants):
                tenants.append(buffer)
                break
        else:
            left.append(buffer)
    return left


def _live(buffers: list[Buffer], end: int) -> list[int]:
    """The bytes alive at each time."""
    change = [0] * (end + 2)
    for buffer in buffers:
        reached = -1
        for start, last in sorted((int(s.start), int(s.end)) for s in buffer.spans):
            start = max(start, reached + 1)
            if last >= start:
                change[start] += buffer.size
                change[last + 1] -= buffer.size
                reached = last
    live, now = [], 0
    for step in change:
        now += step
        live.append(now)
    return live


def _timeline(stretches: list[Stretch], live: list[int]):
    for where, start, end, is_loop in stretches:
        first, last = int(start), int(end)
        if is_loop:
            yield Moment(f"{where}: entry", live[first])
            yield Moment(f"{where}: body", max(live[first : last + 1]))
            yield Moment(f"{where}: exit", live[last])
        else:
            yield Moment(where, live[last])


def _working(loop: Stretch, live: list[int]) -> int:
    first, last = int(loop.start), int(loop.end)
    return max(live[first : last + 1]) - live[first]
