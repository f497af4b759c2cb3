"""The bill of a step before it is compiled: what is kept, what is wasted, and the peak."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from .._policy.policy import RematSpec
from ..plot import plot_residuals
from ._cost import forward_cost, step_cost
from ._names import names_computed_again, names_in
from ._peak import Peak, estimate_peak
from ._program import Argument, Call, as_call, trace
from ._residuals import Residual, Tracker, residuals_of
from ._show import as_text, bill
from ._waste import Finding, findings_of


@dataclasses.dataclass(frozen=True, repr=False)
class Report(JupyterMixin):
    """What one step of training needs, from `explain`. Prints as a table.

    Attributes:
        arguments: The arrays that go in.
        residuals: What the backward pass keeps, one entry for each array of `jax.vjp`'s pullback.
        findings: What is wasted, the largest first.
        names: Every name that a value of the function has.
        recomputed_names: Those of values that the backward pass computes again.
        peak: The estimated temporary memory, its band and its course through the step.
        flops: Floating-point operations of the step.
        forward_flops: Those of the value alone.
        recomputed_flops: Those that the backward pass does for the second time.
        has_unknown_loops: Whether the operations of a loop were counted once, because only data
            decides how often it runs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax.memory import explain
        >>> report = explain(lambda x: jnp.sin(x).sum(), jnp.ones(256))
        >>> [(r.primitive, r.shape, r.bytes) for r in report.residuals]
        [('cos', (256,), 1024)]
        >>> report.kept_bytes, report.forward_evaluations
        (1024, 1.0)
    """

    arguments: tuple[Argument, ...]
    residuals: tuple[Residual, ...]
    findings: tuple[Finding, ...]
    names: frozenset[str]
    recomputed_names: frozenset[str]
    peak: Peak
    flops: float
    forward_flops: float
    recomputed_flops: float
    has_unknown_loops: bool

    @property
    def residual_bytes(self) -> int:
        """What the backward pass reads, arguments included: the bytes in `jax.vjp`'s pullback."""
        return sum(r.bytes for r in self.residuals)

    @property
    def kept_bytes(self) -> int:
        """What is kept on the device beside the arguments."""
        return sum(r.bytes for r in self.residuals if r.kind != "argument" and r.memory == "device")

    @property
    def offloaded_bytes(self) -> int:
        """What is kept in the host's memory beside the arguments."""
        return sum(r.bytes for r in self.residuals if r.kind != "argument" and r.memory == "host")

    @property
    def gradient_bytes(self) -> int:
        """The gradients of the differentiated arguments."""
        return sum(a.bytes for a in self.arguments if a.differentiated)

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs (the gradients among them) and the estimated temporary memory."""
        return self.peak.argument_bytes + self.peak.output_bytes + self.peak.temp_bytes

    @property
    def forward_evaluations(self) -> float:
        """How often the forward pass's operations run in a step: 1 without recomputation."""
        return 1 + self.recomputed_flops / self.forward_flops if self.forward_flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers, fit for JSON.

        Returns:
            Everything in the report, sizes in bytes.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from stackax.memory import explain
            >>> explain(lambda x: jnp.sin(x).sum(), jnp.ones(3)).to_dict()["kept_bytes"]
            12
        """
        totals = (
            "residual_bytes kept_bytes offloaded_bytes gradient_bytes peak_bytes flops "
            "forward_flops recomputed_flops forward_evaluations has_unknown_loops".split()
        )
        peak = self.peak._asdict() | {"timeline": [m._asdict() for m in self.peak.timeline]}
        return {
            "names": sorted(self.names),
            "recomputed_names": sorted(self.recomputed_names),
            "residuals": [_row(r) for r in self.residuals],
            "findings": [finding._asdict() for finding in self.findings],
            "peak": peak,
            **{name: getattr(self, name) for name in totals},
        }

    def to_dataframe(self) -> Any:
        """The residuals as a `pandas.DataFrame`, one row each.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from error
        return pandas.DataFrame([_row(r) for r in self.residuals])

    def plot(self) -> Any:
        """Draws what is kept, by name, with `stackax.plot.plot_residuals`.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plot_residuals(self)

    def __rich__(self) -> RenderableType:
        return bill(self)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def explain(
    fn_or_stack: Any,
    *args: Any,
    remat: RematSpec | None = None,
    argnums: int | Sequence[int] | None = None,
) -> Report:
    """The memory and the work of one step of training, from the trace alone.

    Nothing is compiled and nothing is allocated: arguments may be `jax.ShapeDtypeStruct`s, such as
    `equinox.filter_eval_shape` makes of a model that fits no memory. The step is that of
    `jax.value_and_grad`, jitted without donation. Any differentiable function of JAX will do, with
    loops of this library, of Haliax, of Flax or hand-written.

    Args:
        fn_or_stack: A function; or a stack, of which `fold(*args)` is run; or any other callable
            that holds weights. A stack or callable is differentiated with the arguments.
        *args: What it is called with: arrays, shapes, NamedArrays and pytrees of them.
        remat: The policy to try in every stack of this library among the arguments, instead of the
            stack's own.
        argnums: Which arguments are differentiated, as in `jax.grad`, counting a stack or callable
            as the first. None means all.

    Returns:
        The report.

    Raises:
        TypeError: An argument is no array, or there is nothing that can be differentiated.
        ValueError: A stack has no layers, `remat` finds no stack, or `argnums` no argument.

    Example:
        >>> import equinox as eqx, haliax as hax, jax
        >>> from stackax import Stacked
        >>> from stackax.memory import explain
        >>> from stackax.transformer import TransformerBlock, TransformerConfig
        >>> config = TransformerConfig(layers=8, width=64, heads=4, vocab_size=256, seq_len=32)
        >>> make = Stacked.init(config.Layers, TransformerBlock)
        >>> stack = eqx.filter_eval_shape(lambda key: make(config, key=key), jax.random.key(0))
        >>> x = eqx.filter_eval_shape(lambda: hax.zeros((config.Pos, config.Embed)))
        >>> report = explain(stack, x, remat="save_qkv_proj")
        >>> sorted({r.name for r in report.residuals if r.name})
        ['key_proj', 'query_proj', 'value_proj']
    """
    call = as_call(fn_or_stack, args, "explain").with_remat(remat)
    return report_of(call, argnums, "explain")


def report_of(call: Call, argnums: int | Sequence[int] | None, caller: str) -> Report:
    """The report of a call whose policies are set."""
    with warnings.catch_warnings():
        # Names without effect are a finding.
        warnings.filterwarnings("ignore", message="the remat policy names")
        program = trace(call, argnums, caller)
    tracker = Tracker(program)
    residuals = residuals_of(program, tracker)
    cost, forward = step_cost(program), forward_cost(program)
    peak = estimate_peak(program.step)

    def temp_bytes(other: Call) -> int:
        step = program if other is call else trace(other, argnums, caller)
        return estimate_peak(step.step).temp_bytes

    return Report(
        arguments=program.arguments,
        residuals=tuple(residuals),
        findings=tuple(findings_of(call, program, tracker, residuals, temp_bytes)),
        names=names_in(program.jaxpr),
        recomputed_names=names_computed_again(program.jaxpr),
        peak=peak,
        flops=cost.flops,
        forward_flops=forward.flops,
        recomputed_flops=cost.recomputed_flops,
        has_unknown_loops=cost.has_unknown_loops,
    )


def _row(r: Residual) -> dict[str, Any]:
    """A residual with nothing in it but strings, numbers, lists and None."""
    return {
        **r._asdict(),
        "dtype": str(r.dtype),
        "shape": list(r.shape),
        "axes": list(r.axes) if r.axes else None,
        "layers": list(r.layers),
        "depends_on": sorted(r.depends_on),
        "extent": r.extent,
    }
