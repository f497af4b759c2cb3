"""From what a caller passes to a traced program: the step that `jax.value_and_grad` would run.

One trace gives everything: the value, what the backward pass keeps, and the gradients.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.extend.core import Jaxpr

from .. import _jax
from .._policy.per_call import policies_tried
from .._policy.policy import RematSpec, as_policy
from .._stack.base import Container
from ._bytes import bytes_of

Stack = Container | hax.nn.Stacked | hax.nn.BlockSeq


class Argument(NamedTuple):
    """An array among the arguments.

    Attributes:
        path: Where it is, as one would write it, such as `stack.stacked.into.weight`.
        shape: Its shape.
        dtype: Its dtype.
        axes: Its axes, if it is a NamedArray's.
        differentiated: Whether the step computes its gradient.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[Axis, ...] | None
    differentiated: bool

    @property
    def bytes(self) -> int:
        """Its size."""
        return bytes_of(self)


class Program(NamedTuple):
    """A traced step.

    Attributes:
        arguments: The arrays that it takes.
        jaxpr: Its equations. The outputs are the function's own (`outputs` of them), then the
            residuals, then the gradients of the differentiated arguments.
        consts: Values for what the function closes over.
        outputs: How many arrays the function returns.
        gradients: How many arguments are differentiated.
    """

    arguments: tuple[Argument, ...]
    jaxpr: Jaxpr
    consts: Sequence[Any]
    outputs: int
    gradients: int

    @property
    def residuals(self) -> list[Any]:
        """The variables that hold what the backward pass keeps."""
        return list(self.jaxpr.outvars[self.outputs : -self.gradients])

    @property
    def step(self) -> Any:
        """The program of `jax.value_and_grad`, which returns no residuals."""
        outvars = list(self.jaxpr.outvars)
        returned = outvars[: self.outputs] + outvars[-self.gradients :]
        return _jax.ClosedJaxpr(_jax.with_outputs(self.jaxpr, returned), self.consts)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the differentiated arguments, and so of their gradients."""
        return sum(argument.bytes for argument in self.arguments if argument.differentiated)


class Call(NamedTuple):
    """A function and its arguments.

    Attributes:
        function: The function.
        args: The arguments.
        names: The caller's own names for them.
        tries_policy: Whether the stacks among them have another policy than the caller gave them.
    """

    function: Callable
    args: tuple
    names: tuple[str, ...]
    tries_policy: bool = False

    def with_remat(self, remat: RematSpec | None) -> "Call":
        """The same call with another policy in every stack among the arguments."""
        if remat is None:
            return self
        policy = as_policy(remat)
        if not self.stacks:
            raise ValueError(
                f"remat={remat!r} has no stack to act on: no argument holds a stackax.Stacked or "
                "stackax.BlockSeq. Pass the stack as an argument, not in a closure."
            )

        def replace(leaf: Any) -> Any:
            return leaf.with_policy(policy) if isinstance(leaf, Container) else leaf

        args = jax.tree.map(replace, self.args, is_leaf=_is_stack)
        return self._replace(args=args, tries_policy=True)

    @property
    def stacks(self) -> list[Container]:
        """The stacks of this library among the arguments."""
        leaves = jax.tree.leaves(self.args, is_leaf=_is_stack)
        return [leaf for leaf in leaves if isinstance(leaf, Container)]


def as_call(fn_or_stack: Any, args: tuple[Any, ...], caller: str) -> Call:
    """A call of a function, of a callable with weights, or of a stack's `fold`.

    Args:
        fn_or_stack: A function, or a pytree of arrays that is a stack or can be called. The latter
            become the first argument, so that their weights are differentiated.
        args: What it is called with.
        caller: The public function that was called, for messages.

    Raises:
        TypeError: It can't be called, or an argument is neither an array nor made of arrays.
        ValueError: A stack has no layers.
    """
    if isinstance(fn_or_stack, Stack):
        names = ("stack", *_parameters(type(fn_or_stack).fold, len(args), skip=1))
        call = Call(lambda stack, *rest: stack.fold(*rest), (fn_or_stack, *args), names)
    elif not callable(fn_or_stack):
        raise TypeError(
            f"{caller} takes a function or a stack of layers first, not {_shown(fn_or_stack)}"
        )
    elif any(_is_array(leaf) for leaf in jax.tree.leaves(fn_or_stack)):
        names = ("model", *_parameters(fn_or_stack, len(args)))
        call = Call(lambda model, *rest: model(*rest), (fn_or_stack, *args), names)
    else:
        call = Call(fn_or_stack, args, _parameters(fn_or_stack, len(args)))
    _check_arguments(call, caller)
    return call


class Step(NamedTuple):
    """A call as a function of its arrays, to be traced or compiled.

    Attributes:
        arguments: The arrays.
        shapes: Their types.
        value: From the arrays to what the call returns, as a list of arrays.
        moving: The places of the arrays that are differentiated.
    """

    arguments: tuple[Argument, ...]
    shapes: list[Any]
    value: Callable[..., list[Any]]
    moving: list[int]

    def value_residuals_gradients(self, *arrays: Any) -> tuple[list, list, list]:
        """What `jax.value_and_grad` computes, and what `jax.vjp` keeps for it."""

        def of_moving(*some: Any):
            filled = list(arrays)
            for i, array in zip(self.moving, some, strict=True):
                filled[i] = array
            out = self.value(*filled)
            return [x for x in out if _is_inexact(x)], [x for x in out if not _is_inexact(x)]

        primals = [arrays[i] for i in self.moving]
        values, pullback, others = jax.vjp(of_moving, *primals, has_aux=True)
        if not values:
            raise TypeError("it returns no floating-point array")
        gradients = pullback([jnp.ones_like(value) for value in values])
        return [*values, *others], jax.tree.leaves(pullback), list(gradients)

    def value_and_gradients(self, *arrays: Any) -> tuple[list, list]:
        """What `jax.value_and_grad` computes."""
        values, _, gradients = self.value_residuals_gradients(*arrays)
        return values, gradients


def as_step(call: Call, argnums: int | Sequence[int] | None, caller: str) -> Step:
    """A call as a function of its arrays.

    Args:
        call: The call.
        argnums: Which arguments are differentiated, as in `jax.grad`; None means all. Only their
            floating-point arrays are.
        caller: The public function that was called, for messages.

    Raises:
        TypeError: There is nothing to differentiate.
        ValueError: `argnums` names no argument.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(call.args)
    chosen, axes = _chosen(argnums, call, caller), _axes(call.args)
    arguments = tuple(
        Argument(
            path=_path(path, call.names),
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            axes=axes.get(i),
            differentiated=path[0].idx in chosen and _is_inexact(leaf),
        )
        for i, (path, leaf) in enumerate(paths)
        if _is_array(leaf)
    )
    moving = [i for i, argument in enumerate(arguments) if argument.differentiated]
    if not moving:
        raise TypeError(
            f"{caller} has nothing to differentiate: no argument"
            f"{'' if argnums is None else f' of argnums={argnums}'} holds a floating-point array"
        )

    value, arrays = as_function_of_arrays(call)
    return Step(arguments, [_shape_of(array) for array in arrays], value, moving)


def as_function_of_arrays(call: Call) -> tuple[Callable[..., list[Any]], list[Any]]:
    """A function of arrays alone to a list of arrays, and the arrays of the call."""
    leaves, treedef = jax.tree.flatten(call.args)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def value(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        out = jax.tree.leaves(call.function(*jax.tree.unflatten(treedef, filled)))
        return [leaf for leaf in out if _is_array(leaf)]

    return value, [leaves[i] for i in places]


def trace(call: Call, argnums: int | Sequence[int] | None, caller: str) -> Program:
    """Traces the value and the gradients of a call; the arguments are those of `as_step`.

    Raises:
        TypeError: There is nothing to differentiate, or it can't be.
        ValueError: `argnums` names no argument.
    """
    step = as_step(call, argnums, caller)
    whole = jax.make_jaxpr(step.value_residuals_gradients, return_shape=True)
    try:
        with policies_tried(call.tries_policy):
            closed, out = whole(*step.shapes)
    except Exception as error:
        jax.eval_shape(step.value, *step.shapes)  # if this fails too, that is the answer
        name = _name_of(call.function)
        raise TypeError(f"{caller} can't differentiate {name}: {error}") from error
    return Program(step.arguments, closed.jaxpr, closed.consts, len(out[0]), len(step.moving))


def compile_step(call: Call, argnums: int | Sequence[int] | None, caller: str) -> Any:
    """The step, jitted without donation and compiled; the arguments are those of `as_step`."""
    step = as_step(call, argnums, caller)
    return jax.jit(step.value_and_gradients).lower(*step.shapes).compile()


def _check_arguments(call: Call, caller: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(call.args, is_leaf=_is_stack)[0]:
        if isinstance(leaf, Stack) and leaf.Block.size == 0:
            raise ValueError(
                f"{_path(path, call.names)} has zero layers, so {caller} has nothing to explain: "
                "give it at least one layer"
            )
    for path, leaf in jax.tree_util.tree_flatten_with_path(call.args)[0]:
        known = _is_array(leaf) or callable(leaf) or isinstance(leaf, (bool, int, float, complex))
        if not known:
            raise TypeError(
                f"{_path(path, call.names)} is {_shown(leaf)}, and {caller} takes arrays, "
                "jax.ShapeDtypeStructs and pytrees of them: bind anything else with "
                "functools.partial or a lambda"
            )


def _chosen(argnums: int | Sequence[int] | None, call: Call, caller: str) -> set[int]:
    count = len(call.args)
    if argnums is None:
        return set(range(count))
    asked = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in asked:
        if not isinstance(number, int) or not -count <= number < count:
            raise ValueError(
                f"argnums={argnums!r} names no argument: {caller} was given {count}, "
                f"{', '.join(call.names)}"
            )
    return {number % count for number in asked}


def _parameters(function: Callable, count: int, skip: int = 0) -> tuple[str, ...]:
    """The names of the first positional parameters, or `args[i]` where they are not known."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in positional][:count]
    return (*named, *(f"args[{i}]" for i in range(len(named), count)))


def _path(path: tuple, names: Sequence[str]) -> str:
    rest = jax.tree_util.keystr(path[1:])
    return names[int(path[0].idx)] + re.sub(r"\[<flat index 0>\]$", "", rest)


def _axes(args: tuple) -> dict[int, tuple[Axis, ...]]:
    """The axes of NamedArrays, by the place of their array among all leaves."""
    axes, place = {}, 0
    for leaf in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, NamedArray)):
        if isinstance(leaf, NamedArray):
            axes[place] = leaf.axes
        place += 1
    return axes


def _is_stack(x: Any) -> bool:
    return isinstance(x, Stack)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _is_inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval = jax.typeof(leaf)
    if _jax.is_on_host(aval) or _jax.explicit_sharding(aval) is not None:
        return leaf  # no shape says where an array lies
    # A weak type is that of a number which gives way to other dtypes.
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=aval.weak_type)


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", repr(function)).replace("<lambda>", "the lambda")


def _shown(x: Any) -> str:
    return f"{x!r}, a {type(x).__name__}"
