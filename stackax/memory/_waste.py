"""Waste, named: what a step keeps or recomputes to no purpose, with its bytes and the cure."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import haliax as hax
import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .. import _jax
from .._loop.scopes import REMATTED
from .._policy.policy import ScanCheckpointPolicy, did_you_mean
from .._stack.base import Container
from ._bytes import bytes_of, show_bytes
from ._names import names_in
from ._program import Call, Program, Stack
from ._residuals import CHECKPOINTS, Residual, Tracker, source_of_value
from ._source import source_of
from ._walk import Loop, equations, inner_jaxprs, scan_of

# Below this share of what is kept, a finding would cost more to read than to ignore.
_NEGLIGIBLE = 0.01
# An unnamed value is worth a name if it is this share of what is kept, and so many carries.
_LARGE_SHARE, _LARGE_CARRIES = 1 / 3, 4


class Finding(NamedTuple):
    """One kind of waste.

    Attributes:
        kind: Which kind, such as `"weights copied"`.
        bytes: How much memory it takes; 0 where it takes none, but does nothing either.
        source: File, line and function in the user's code, "" if it is not known.
        what: What happens, in words.
        fix: What to do about it.
    """

    kind: str
    bytes: int
    source: str
    what: str
    fix: str


def findings_of(
    call: Call,
    program: Program,
    tracker: Tracker,
    residuals: list[Residual],
    temp_bytes: Callable[[Call], int],
) -> list[Finding]:
    """Everything that is wasted, the largest first.

    Args:
        call: What was traced.
        program: Its program.
        tracker: The program's tracker.
        residuals: The program's residuals.
        temp_bytes: The estimated temporary bytes of a call, to compare policies with.
    """
    kept = sum(r.bytes for r in residuals if r.kind != "argument")
    found = [
        *_copied_weights(residuals),
        *_stacked_invariants(residuals),
        *_outputs_that_are_inputs(program, tracker),
        *_large_without_name(residuals, kept),
        *_remat_undone(program),
    ]
    found = [finding for finding in found if finding.bytes > _NEGLIGIBLE * kept]
    has_nested_policy = any(_is_nested(stack) for stack in _stacks(call))
    nested = _nested_policies(call, temp_bytes) if has_nested_policy else _nested_loops(program)
    found += [*_idle_names(call, program, residuals), *nested]
    return sorted(found, key=lambda finding: -finding.bytes)


def _copied_weights(residuals: list[Residual]) -> Iterator[Finding]:
    """Values of each layer that are its inputs, or are computed from its inputs alone."""
    copies = [r for r in residuals if r.layers and r.kind == "slice"]
    made = [r for r in residuals if r.layers and r.depends_on == {"per-layer input"}]
    made = [r for r in made if r.kind == "computed"]
    casts = [r for r in made if r.primitive == "convert_element_type"]
    others = [r for r in made if r.primitive != "convert_element_type"]
    fix = "use remat=True, or any policy: jax.checkpoint reads the weights again"
    if copies:
        what = f"a second copy of {_listed(r.origin for r in copies)} is stacked layer by layer"
        cure = f"take the checkpoint_name off what the loop slices, or {fix}"
        yield _finding("weights copied", copies, what, cure)
    if casts:
        dtypes = " and ".join(sorted({str(r.dtype) for r in casts}))
        what = f"a copy of the layers' weights, cast to {dtypes}, is kept for each layer"
        yield _finding("weights cast per layer", casts, what, f"cast before the loop, or {fix}")
    if others:
        what = (
            f"kept, but computed from a layer's weights alone: {_listed(r.label for r in others)}"
        )
        yield _finding("weights transformed per layer", others, what, fix)


def _stacked_invariants(residuals: list[Residual]) -> Iterator[Finding]:
    for r in residuals:
        if r.layers and (r.kind == "constant" or r.depends_on == {"constants"}):
            yield _finding(
                "same value kept for every layer",
                [r],
                f"{r.label} is the same for every layer, and is kept {_times(r.layers)} times",
                "pass it to the loop as an argument for all layers, not in the carry",
            )


def _outputs_that_are_inputs(program: Program, tracker: Tracker) -> Iterator[Finding]:
    residuals = {x for x in program.residuals if isinstance(x, Var)}
    returned = {x for x in program.jaxpr.outvars if isinstance(x, Var)}
    for eqn in program.jaxpr.eqns:
        loop = scan_of(eqn)
        if loop is None or _jax.is_transposed(eqn):
            continue
        for place, var in enumerate(eqn.outvars[loop.carries :], loop.carries):
            is_read = var in returned or tracker.reader.readers(program.jaxpr, var)
            found = tracker.find(var)
            if var in residuals or not is_read or found.kind != "slice":
                continue
            path = program.arguments[found.argument].path if found.argument is not None else ""
            yield Finding(
                "scan output that is its input",
                bytes_of(var.aval),
                source_of_value(found),
                f"the loop stacks a copy of {path or 'what it slices'}, which it returns as its "
                f"output {place - loop.carries}",
                "return only what the body computes, and use the argument itself after the loop",
            )


def _large_without_name(residuals: list[Residual], kept: int) -> Iterator[Finding]:
    carry = max((r.bytes_per_layer for r in residuals if r.kind == "carry"), default=0)
    for r in residuals if carry else ():
        is_large = r.bytes >= _LARGE_SHARE * kept and r.bytes_per_layer >= _LARGE_CARRIES * carry
        is_computed = r.kind == "computed" and r.depends_on != {"per-layer input"}
        if r.layers and is_computed and r.name is None and is_large:
            yield _finding(
                "large value without a name",
                [r],
                f"{r.label} is {r.bytes / kept:.0%} of what is kept, and no policy can name it",
                "use remat=True; or name it, or what it is computed from, with "
                "stackax.checkpoint_name(x, 'a_name'), and keep that",
            )


def _idle_names(call: Call, program: Program, residuals: list[Residual]) -> Iterator[Finding]:
    """Names in a policy that keep nothing."""
    effective = {r.name for r in residuals}
    present = names_in(program.jaxpr)
    for name in _names_asked(call):
        if name not in effective:
            reason = (
                "is never needed by the backward pass"
                if name in present
                else f"is the name of no value{did_you_mean(name, present).rstrip('.')}"
            )
            yield Finding(
                "name without effect",
                0,
                "",
                f"the policy keeps {name!r}, which {reason}",
                f"drop it, or mark with it what a derivative reads: {sorted(present)} are there",
            )


def _names_asked(call: Call) -> list[str]:
    """The names that policies ask for one by one."""
    names: list[str] = []
    for stack in _stacks(call):
        policy = stack.gradient_checkpointing
        if isinstance(policy, ScanCheckpointPolicy):
            if policy.match_names == "all":  # a vocabulary may have names to spare
                names += policy.saved_names + policy.offloaded_names
        elif isinstance(policy, hax.nn.ScanCheckpointPolicy):
            for field in (policy.save_block_internals, policy.offload_block_internals):
                names += [] if isinstance(field, bool) else list(field)
    return list(dict.fromkeys(names))


def _nested_policies(call: Call, temp_bytes: Callable[[Call], int]) -> Iterator[Finding]:
    """Stacks whose nested remat needs no less memory than simple remat does."""
    simple = call._replace(
        args=jax.tree.map(
            lambda x: _simple(x) if isinstance(x, Stack) and _is_nested(x) else x,
            call.args,
            is_leaf=lambda x: isinstance(x, Stack),
        )
    )
    more = temp_bytes(call) - temp_bytes(simple)
    if more >= 0:
        yield Finding(
            "nested remat that saves nothing",
            more,
            "",
            f"nested remat needs {show_bytes(more)} more than simple remat, and recomputes more",
            "use remat=True, or slots=k with fewer slots than nesting has",
        )


def _nested_loops(program: Program) -> Iterator[Finding]:
    """Scans of rematerialised scans that are not worth it.

    Nesting keeps `outer + inner` carries in the place of `outer * inner`, and holds one segment's
    weights and their gradients, 2 x inner x weights, while the segment is differentiated.
    """
    for eqn in equations(program.jaxpr):
        outer = scan_of(eqn)
        if outer is None or not _jax.is_transposed(eqn):
            continue
        for inner_eqn, inner in _rematted_scans(outer.body):
            sizes = [bytes_of(x.aval) for x in inner_eqn.invars]
            carry = sum(sizes[inner.consts : inner.consts + inner.carries])
            weights = sum(sizes[inner.consts + inner.carries :])
            saved = (outer.length * inner.length - outer.length - inner.length) * carry
            if weights and 2 * weights >= saved:
                yield Finding(
                    "nested remat that saves nothing",
                    2 * weights - saved,
                    source_of(inner_eqn),
                    f"a scan of {outer.length} segments of {inner.length} saves "
                    f"{show_bytes(saved)} of carries, and holds {show_bytes(2 * weights)} of a "
                    "segment's weights and their gradients",
                    "use simple remat, or stackax.fold(..., remat=ScanCheckpointPolicy(slots=k))",
                )


def _rematted_scans(jaxpr: Jaxpr, within: bool = False) -> Iterator[tuple[JaxprEqn, Loop]]:
    """The forward scans over rematerialised steps inside a `jax.checkpoint`."""
    for eqn in jaxpr.eqns:
        loop = scan_of(eqn)
        if loop is None:
            for inner in inner_jaxprs(eqn):
                yield from _rematted_scans(inner, within or eqn.primitive.name in CHECKPOINTS)
        elif within and REMATTED in _jax.name_stack(eqn):
            yield eqn, loop


def _remat_undone(program: Program) -> Iterator[Finding]:
    """Recomputations that stand beside the forward pass with nothing to keep them apart."""
    for eqn in _outside_loops(program.jaxpr):
        barrier = eqn.params.get("prevent_cse", True) and _jax.barrier_survives_compilation()
        if eqn.primitive.name in CHECKPOINTS and not barrier:
            again = [e for e in _jax.open_jaxpr(eqn.params["jaxpr"]).eqns if _is_again(e)]
            size = sum(bytes_of(x.aval) for e in again for x in e.outvars)
            yield Finding(
                "remat undone",
                size,
                source_of(eqn),
                "no loop separates this recomputation from the forward pass, so the compiler "
                "merges the two and keeps what was to be computed again",
                "don't unroll the loop; or set prevent_cse=True, which has an effect on "
                "accelerators, and on CPUs from jax 0.12 on",
            )


def _outside_loops(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations that are in no loop of two trips or more, unrolled ones counting as none."""
    for eqn in jaxpr.eqns:
        yield eqn
        loop = scan_of(eqn)
        if loop and loop.length >= 2 and eqn.params["unroll"] < loop.length:
            continue
        if eqn.primitive.name != "while":
            for inner in inner_jaxprs(eqn):
                yield from _outside_loops(inner)


def _is_again(eqn: JaxprEqn) -> bool:
    return REMATTED in _jax.name_stack(eqn)


def _stacks(call: Call) -> list[Any]:
    leaves = jax.tree.leaves(call.args, is_leaf=lambda x: isinstance(x, Stack))
    return [leaf for leaf in leaves if isinstance(leaf, Stack)]


def _is_nested(stack: Any) -> bool:
    policy = stack.gradient_checkpointing
    return bool(getattr(policy, "nested", False)) and not getattr(policy, "disable", False)


def _simple(stack: Any) -> Any:
    if isinstance(stack, Container):
        return stack.with_policy(True)
    policy = hax.nn.ScanCheckpointPolicy(simple=True)
    return dataclasses.replace(stack, gradient_checkpointing=policy)


def _finding(kind: str, rows: list[Residual], what: str, fix: str) -> Finding:
    largest = max(rows, key=lambda r: r.bytes)
    return Finding(kind, sum(r.bytes for r in rows), largest.source, what, fix)


def _listed(names: Iterable[str | None]) -> str:
    """Names, each once, in a row; of many only the first three."""
    distinct = list(dict.fromkeys(name or "a value" for name in names))
    rest = len(distinct) - 3
    return ", ".join(distinct[:3]) + (f" and {rest} more" if rest > 0 else "")


def _times(layers: tuple[int, ...]) -> str:
    return " x ".join(map(str, layers))
