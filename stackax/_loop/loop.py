"""fold, scan and map over a named axis: the front door of the loops."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis

from .. import _jax
from .._policy.names import check_names, find_names, has_names_to_check
from .._policy.policy import RematSpec, ScanCheckpointPolicy, as_policy
from ..stream._stream import Stream
from .plain import run_plain
from .rolled import Streaming, slices_of
from .schedule import revolve, schedule_for
from .scheduled import run_scheduled
from .slicing import Arguments, Slicer, argument_names, infer_axis
from .step import Step
from .streamed import of_no_layers, streaming_of


def scan(
    f: Callable,
    axis: Axis | str,
    *,
    remat: RematSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: bool | Callable[[Any], bool] = True,
) -> Callable:
    """Runs `f` once per entry of a named axis, carrying a value and stacking the outputs.

    `scan(f, axis)(init, xs)` is `jax.lax.scan(f, init, xs)` over the axis of that name, wherever it
    stands in a NamedArray. An argument is sliced if it is a NamedArray with the axis, a plain array
    (along its first axis) or marked `per_layer`; it is passed whole if it is a NamedArray without
    the axis, a scalar, not an array, or marked `shared`. A typed PRNG key is split.

    Args:
        f: `f(carry, *args, **kwargs) -> (carry, output)`. The carry is any pytree, and keeps its
            structure, axes, shapes and dtypes. The output is any pytree of arrays.
        axis: The axis, or its name if an argument has it.
        remat: What the backward pass keeps; a policy or an alias of one.
        reverse: Whether to run from the last entry to the first. Outputs keep the axis's order.
        unroll: How many steps one trip of the loop runs; `True` for all.
        is_scanned: Which unmarked arrays may be sliced, as a function of the array.

    Returns:
        A function of `(init, *args, **kwargs)` that returns the last carry and the outputs, each
        with the axis first.

    Raises:
        ValueError: An argument to be sliced has another size; the policy is unknown or names
            nothing; `f` returns no pair.
        TypeError: The carry changes its type.

    Example:
        >>> import haliax as hax
        >>> from stackax import scan
        >>> Time = hax.Axis("time", 3)
        >>> running_sum = scan(lambda total, x: (total + x, total + x), Time)
        >>> last, sums = running_sum(hax.zeros((), dtype=int), hax.arange(Time))
        >>> int(last.array), sums.shape, sums.array.tolist()
        (3, {'time': 3}, [0, 1, 3])

    References:
        Mirrors `haliax.scan`.
    """
    names = argument_names(f, skip=1)
    return _curried(f, names, axis, remat, reverse, unroll, is_scanned)


def fold(
    f: Callable,
    axis: Axis | str,
    *,
    remat: RematSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_scanned: bool | Callable[[Any], bool] = True,
) -> Callable:
    """Runs `f` once per entry of a named axis, carrying a value; `scan` without outputs.

    Args:
        f: `f(carry, *args, **kwargs) -> carry`.
        axis: The axis, or its name if an argument has it.
        remat: What the backward pass keeps; a policy or an alias of one.
        reverse: Whether to run from the last entry to the first.
        unroll: How many steps one trip of the loop runs; `True` for all.
        is_scanned: Which unmarked arrays may be sliced, as a function of the array.

    Returns:
        A function of `(init, *args, **kwargs)` that returns the last carry.

    Raises:
        ValueError: As `scan`.
        TypeError: As `scan`.

    Example:
        >>> import haliax as hax
        >>> from stackax import fold
        >>> Time = hax.Axis("time", 3)
        >>> total = fold(lambda carry, x: carry + x, "time")
        >>> int(total(hax.zeros((), dtype=int), hax.arange(Time)).array)
        3

    References:
        Mirrors `haliax.fold`.
    """

    def without_output(carry: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        return f(carry, *args, **kwargs), None

    names = argument_names(f, skip=1)
    scanned = _curried(without_output, names, axis, remat, reverse, unroll, is_scanned)

    def folded(init: Any, *args: Any, **kwargs: Any) -> Any:
        return scanned(init, *args, **kwargs)[0]

    return folded


def map(
    f: Callable,
    axis: Axis | str,
    *,
    remat: RematSpec = False,
    reverse: bool = False,
    unroll: int | bool = 1,
    is_mapped: bool | Callable[[Any], bool] = True,
) -> Callable:
    """Runs `f` once per entry of a named axis, one after the other; `scan` without a carry.

    Args:
        f: `f(*args, **kwargs) -> output`.
        axis: The axis, or its name if an argument has it.
        remat: What the backward pass keeps; a policy or an alias of one.
        reverse: Whether to run from the last entry to the first. Outputs keep the axis's order.
        unroll: How many steps one trip of the loop runs; `True` for all.
        is_mapped: Which unmarked arrays may be sliced, as a function of the array.

    Returns:
        A function of `(*args, **kwargs)` that returns the outputs, each with the axis first.

    Raises:
        ValueError: As `scan`.

    Example:
        >>> import haliax as hax
        >>> from stackax import map
        >>> Time = hax.Axis("time", 3)
        >>> map(lambda x: 2 * x, Time)(hax.arange(Time)).array.tolist()
        [0, 2, 4]

    References:
        Mirrors `haliax.map`.
    """

    def without_carry(_: None, *args: Any, **kwargs: Any) -> tuple[None, Any]:
        return None, f(*args, **kwargs)

    names = argument_names(f, skip=0)
    scanned = _curried(without_carry, names, axis, remat, reverse, unroll, is_mapped)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return scanned(None, *args, **kwargs)[1]

    return mapped


def _curried(
    f: Callable,
    names: Callable[[int], str],
    axis: Axis | str,
    remat: RematSpec,
    reverse: bool,
    unroll: int | bool,
    is_scanned: bool | Callable[[Any], bool],
) -> Callable[..., tuple[Any, Any]]:
    policy = as_policy(remat)
    may_slice = is_scanned if callable(is_scanned) else lambda _: is_scanned

    def scanned(init: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        layers = axis if isinstance(axis, Axis) else infer_axis(axis, args, kwargs, may_slice)
        arguments = Slicer(layers, names, "quiet", may_slice).take_apart(args, kwargs)
        return run(f, init, arguments, layers, policy=policy, reverse=reverse, unroll=unroll)

    return scanned


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """`call(block, carry, ...)` as a loop's step, of which the first argument is the block.

    Attributes:
        call: What is run for each block.
        has_outputs: Whether `call` returns a pair of carry and output, or the carry alone.
    """

    call: Callable
    has_outputs: bool

    def __call__(self, carry: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        """The pair of carry and output."""
        result = self.call(block, carry, *args, **kwargs)
        return result if self.has_outputs else (result, None)


def run(
    f: Callable,
    init: Any,
    arguments: Arguments,
    layers: Axis,
    *,
    policy: ScanCheckpointPolicy,
    reverse: bool,
    unroll: int | bool | None,
    stream: Stream | None = None,
) -> tuple[Any, Any]:
    """Loops over arguments that are taken apart already; compiled once where called eagerly."""
    options = (layers, policy, bool(reverse), trip_length(unroll, layers.size), stream)
    if _can_be_compiled(f, init, arguments):
        return _run_compiled(f, init, arguments, options, _fingerprint(init, arguments))
    return _run(f, init, arguments, options)


def trip_length(unroll: int | bool | None, length: int) -> int:
    """How many layers one trip of the loop runs, from what the caller says."""
    if unroll is None or unroll is False:
        return 1
    if unroll is True:
        return max(1, length)
    if not isinstance(unroll, int):
        raise TypeError(f"unroll must be a whole number, True or False, not {unroll!r}.")
    if unroll < 1:
        raise ValueError(f"unroll={unroll} is too few: at least 1 layer a trip is needed.")
    return min(unroll, max(1, length))


def carry_name(layers: Axis) -> str:
    """What a policy calls the carry of a loop; nested loops have different axes."""
    return f"scan({layers.name})__carry"


def _run(f: Callable, init: Any, arguments: Arguments, options: tuple) -> tuple[Any, Any]:
    layers, policy, reverse, unroll, stream = options
    step = Step(f, init, arguments, layers)
    streaming = streaming_of(stream, policy, arguments) if layers.size > 0 else None
    per_layer = arguments.per_layer
    if stream is not None and layers.size == 0:
        per_layer = of_no_layers(per_layer)
    _check_names(step, arguments, layers, policy, streaming)
    tree = schedule_for(layers.size, nested=policy.nested, slots=policy.slots)
    if streaming is not None and tree is None:
        tree = revolve(layers.size, layers.size)
    with jax.named_scope(f"scan({layers.name})"):
        if tree is None:
            carry, outputs = run_plain(
                step,
                per_layer,
                arguments.shared,
                length=layers.size,
                policy=policy,
                reverse=reverse,
                unroll=unroll,
                carry_name=carry_name(layers),
            )
        else:
            carry, outputs = run_scheduled(
                step,
                per_layer,
                arguments.shared,
                tree=tree,
                reverse=reverse,
                unroll=unroll,
                offload=policy.save_carries == "offload",
                streaming=streaming,
            )
    return step.carry(carry), step.outputs(outputs)


@eqx.filter_jit
def _run_compiled(
    f: Callable, init: Any, arguments: Arguments, options: tuple, fingerprint: tuple
) -> Any:
    return _run(f, init, arguments, options)


def _fingerprint(init: Any, arguments: Arguments) -> tuple:
    """What tells apart calls whose parts are equal: 1 is True, and 0.0 is -0.0."""
    shown = tuple((type(leaf).__name__, repr(leaf)) for leaf in _numbers(init, arguments))
    mapping = hax.partitioning.current_thread_local_mapping() or {}
    return shown, tuple(sorted((name, str(where)) for name, where in mapping.items()))


def _numbers(init: Any, arguments: Arguments) -> list[Any]:
    parts = jax.tree.leaves(init) + [leaf.value for leaf in arguments.leaves]
    return [part for part in parts if isinstance(part, (bool, int, float, complex))]


def _can_be_compiled(f: Callable, init: Any, arguments: Arguments) -> bool:
    """Whether a call is eager, and the same call again can be recognised.

    A function with a closure may mean something else the next time, and so may an object that is
    equal to itself alone, whatever it holds.
    """
    if not _jax.nothing_is_being_traced() or not isinstance(f, PerBlock):
        return False
    if not isinstance(f.call, types.FunctionType) or f.call.__closure__:
        return False
    static = eqx.filter((init, arguments), eqx.is_array, inverse=True)
    try:
        hash((tuple(jax.tree.leaves(static)), jax.tree.structure(static)))
    except TypeError:
        return False
    parts = jax.tree.leaves(static) + [leaf.value for leaf in arguments.leaves]
    return all(_means_the_same_again(part) for part in parts)


def _means_the_same_again(part: Any) -> bool:
    if isinstance(part, types.FunctionType):
        return not part.__closure__
    return part is None or callable(part) or type(part).__hash__ is not object.__hash__


def _check_names(
    step: Step,
    arguments: Arguments,
    layers: Axis,
    policy: ScanCheckpointPolicy,
    streaming: Streaming | None,
) -> None:
    if has_names_to_check(policy) and layers.size > 0:
        args = (step.init, slices_of(arguments.per_layer, streaming), arguments.shared)
        check_names(policy, [find_names(step, args, policy)], layers.name)
