"""ScanCheckpointPolicy: what the backward pass of a loop keeps, recomputes or sends to the host."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from . import presets


@dataclasses.dataclass(frozen=True)
class ScanCheckpointPolicy:
    """What the backward pass of a loop over layers keeps, recomputes or sends to the host.

    A block takes a carry to a carry. Differentiating N blocks needs every block's input and its
    internals; this says where they come from. Made without arguments it is *simple remat*: the
    carry into each block is kept, everything inside a block is computed again.

    Wherever a policy is accepted, so is an alias: `True` (simple remat), `False` (keep all), a
    string of Haliax's or MaxText's (see `from_bool_or_str`).

    Args:
        save_carries: `True` keeps the carry into each block on the device; `"offload"` keeps it
            in the host's memory. `False` is accepted for Haliax's sake and is the same as `True`:
            the carry is where recomputation starts from, so it cannot be computed again.
        save_inputs: Per-layer inputs (weights and sliced arguments) are arguments of the loop and
            alive whatever a policy says, so this is accepted only together with
            `save_block_internals=True`, where the three fields together say "save all".
        save_block_internals: `True` keeps every internal (no rematerialisation at all); a
            collection of names keeps the values that the block marks with
            [`checkpoint_name`][stackax.checkpoint_name]; `False` keeps none.
        offload_block_internals: Names of the internals to keep in the host's memory.
        prevent_cse: Whether to forbid the compiler to merge the recomputation with the forward
            pass, which would undo it. `None` decides: only where the loop does not survive
            compilation (one layer, or unrolled) is it needed.
        disable: Keep everything; the same as `remat=False`.
        simple: Keep carries and nothing else; the same as no arguments, said aloud.
        nested: Keep only some of the carries. `True` keeps the fewest that cost at most three
            forward evaluations a layer (simple remat costs two). An int n keeps the first carry
            of n equal segments, and recomputes a segment at a time; a tuple nests further, one
            entry a level.
        slots: Keep exactly this many carries, with the least number of forward evaluations
            possible (the binomial schedule). From the number of layers upwards, simple remat.
        match_names: `"all"`: every name must occur in the block, or it is an error. `"any"`: the
            names are a vocabulary, of which at least one must occur.

    Raises:
        TypeError: A field has a value of the wrong type.
        ValueError: A field has an impossible value, or could have no effect in this combination.

    Example:
        >>> from stackax import ScanCheckpointPolicy
        >>> policy = ScanCheckpointPolicy(save_block_internals=["query_proj"])
        >>> policy.save_block_internals
        ('query_proj',)
        >>> ScanCheckpointPolicy(slots=8) == ScanCheckpointPolicy(slots=8)
        True

    References:
        `slots`: Griewank and Walther (2000), "Algorithm 799: revolve", ACM TOMS 26(1).
        The first eight fields mirror `haliax.nn.ScanCheckpointPolicy`.
    """

    save_carries: bool | Literal["offload"] = True
    save_inputs: bool = False
    save_block_internals: bool | Collection[str] = False
    offload_block_internals: Collection[str] = ()
    prevent_cse: bool | None = None
    disable: bool = False
    simple: bool = False
    nested: bool | int | tuple[int, ...] = False
    slots: int | None = None
    match_names: Literal["all", "any"] = "all"

    def __post_init__(self):
        self._normalise_names()
        self._check_values()
        self._check_combinations()

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again in the backward pass.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> ScanCheckpointPolicy().recomputes, ScanCheckpointPolicy(disable=True).recomputes
            (True, False)
        """
        return not self.disable and self.save_block_internals is not True

    @property
    def has_names(self) -> bool:
        """Whether any internal is kept by name.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> ScanCheckpointPolicy.from_bool_or_str("minimal").has_names
            True
        """
        return bool(self.saved_names or self.offloaded_names)

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The internals kept on the device, by name.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> ScanCheckpointPolicy.from_bool_or_str("save_out_proj").saved_names
            ('out_proj',)
        """
        return self.save_block_internals if isinstance(self.save_block_internals, tuple) else ()

    @property
    def offloaded_names(self) -> tuple[str, ...]:
        """The internals kept in the host's memory, by name.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> ScanCheckpointPolicy(offload_block_internals={"context"}).offloaded_names
            ('context',)
        """
        return tuple(self.offload_block_internals)

    @staticmethod
    def from_bool_or_str(remat_policy: "bool | str") -> "ScanCheckpointPolicy":
        """The policy that a bool or a name stands for.

        | alias | stands for |
        |---|---|
        | `True`, `"full"`, `"recompute"` | `simple=True` |
        | `False`, `"none"` | `disable=True` |
        | `"save_all"` | `save_inputs=True, save_block_internals=True` |
        | `"offload"` | `save_carries="offload"` |
        | `"nested"` | `nested=True` |
        | `"slots=8"` | `slots=8`, or any other number |
        | `"minimal"`, `"save_qkv_proj"` and MaxText's others | its names, `match_names="any"` |

        Args:
            remat_policy: A bool, an alias, or the name of a preset.

        Raises:
            TypeError: It is neither a bool nor a string.
            ValueError: There is no such name; the nearest one is suggested.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> ScanCheckpointPolicy.from_bool_or_str("nested")
            ScanCheckpointPolicy(nested=True)
        """
        if isinstance(remat_policy, bool):
            return (
                ScanCheckpointPolicy(simple=True)
                if remat_policy
                else ScanCheckpointPolicy(disable=True)
            )
        if not isinstance(remat_policy, str):
            given = type(remat_policy)
            raise TypeError(
                "a remat policy is a bool, a string or a stackax.ScanCheckpointPolicy, not a "
                f"{given.__module__}.{given.__name__}. To keep values by their names, give "
                "ScanCheckpointPolicy(save_block_internals=['a_name'])."
            )
        fields = presets.fields_of(remat_policy)
        if slots := re.fullmatch(r"slots=(\d+)", remat_policy):
            fields = dict(slots=int(slots[1]))
        if fields is None:
            raise ValueError(
                f"there is no remat policy {remat_policy!r}"
                f"{did_you_mean(remat_policy, [*presets.known_names(), 'slots=8'])} "
                f"Known: {', '.join(map(repr, presets.known_names()))}, 'slots=8'. To keep a value "
                f"of this name, give ScanCheckpointPolicy(save_block_internals=[{remat_policy!r}])."
            )
        return ScanCheckpointPolicy(**fields)

    @staticmethod
    def custom(
        names: Mapping[str, Literal["device", "offload", "remat"]],
    ) -> "ScanCheckpointPolicy":
        """A policy from one decision for each name, as MaxText's `custom`.

        Args:
            names: For each name `"device"` (keep), `"offload"` (keep in the host's memory) or
                `"remat"` (compute again).

        Raises:
            ValueError: A decision is none of the three.

        Example:
            >>> from stackax import ScanCheckpointPolicy
            >>> policy = ScanCheckpointPolicy.custom({"query_proj": "device", "mlpwo": "offload"})
            >>> policy.saved_names, policy.offloaded_names
            (('query_proj',), ('mlpwo',))
        """
        decisions = ("device", "offload", "remat")
        for name, decision in names.items():
            if decision not in decisions:
                raise ValueError(
                    f"custom policy: {name!r} is set to {decision!r}"
                    f"{did_you_mean(decision, decisions)} Say 'device', 'offload' or 'remat'."
                )
        return ScanCheckpointPolicy(
            save_block_internals=tuple(n for n, d in names.items() if d == "device"),
            offload_block_internals=tuple(n for n, d in names.items() if d == "offload"),
        )

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in self._given_fields()]
        return f"ScanCheckpointPolicy({', '.join(given)})"

    def _given_fields(self) -> list[str]:
        """The fields that differ from their defaults."""
        fields = dataclasses.fields(self)
        return [f.name for f in fields if getattr(self, f.name) != f.default]

    def _normalise_names(self):
        saved = self.save_block_internals
        if not isinstance(saved, bool):
            saved = _names("save_block_internals", saved) or False
        object.__setattr__(self, "save_block_internals", saved)
        offloaded = _names("offload_block_internals", self.offload_block_internals)
        object.__setattr__(self, "offload_block_internals", offloaded)
        nested = self.nested
        if isinstance(nested, Iterable) and not isinstance(nested, str):
            nested = tuple(map(_as_int, nested))
        object.__setattr__(self, "nested", _as_int(nested))
        object.__setattr__(self, "slots", _as_int(self.slots))

    def _check_values(self):
        _check_choice("save_carries", self.save_carries, (True, False, "offload"))
        _check_choice("save_inputs", self.save_inputs, (True, False), hint=_WEIGHTS_STAY)
        _check_choice("prevent_cse", self.prevent_cse, (True, False, None))
        _check_choice("disable", self.disable, (True, False))
        _check_choice("simple", self.simple, (True, False))
        _check_choice("match_names", self.match_names, ("all", "any"))
        if self.slots is not None:
            _check_count("slots", self.slots, least=1)
        if not isinstance(self.nested, bool):
            counts = self.nested if isinstance(self.nested, tuple) else (self.nested,)
            for count in counts:
                _check_count("nested", count, least=2)
            if not counts:
                raise ValueError("nested=() names no level: say nested=True, an int or a tuple.")

    def _check_combinations(self):
        names = self.saved_names + self.offloaded_names
        both = sorted(set(self.saved_names) & set(self.offloaded_names))
        thins = self.nested is not False or self.slots is not None
        loop = "slots" if self.slots is not None else "nested"
        keeps_all = self.disable or self.save_block_internals is True
        rules = [
            (
                bool(both),
                f"{both} are both in save_block_internals and in offload_block_internals: "
                "leave each in one of them.",
            ),
            (
                self.slots is not None and self.nested is not False,
                "slots and nested are two answers to one question, which carries to keep: "
                "give one of them.",
            ),
            (
                thins and bool(names or self.save_block_internals),
                f"named internals live within one step, and {loop} keeps nothing of a step but "
                f"some of the carries: drop {loop}, or save_block_internals and "
                "offload_block_internals.",
            ),
            (
                self.disable and self._given_fields() != ["disable"],
                "disable=True keeps everything, so no other field can have an effect: "
                "use remat=False, or drop disable.",
            ),
            (
                self.simple and bool(names or self.save_block_internals or self.save_inputs),
                "simple=True keeps nothing but carries: drop it, or the fields that keep more.",
            ),
            (
                keeps_all and (self.save_carries == "offload" or bool(self.offloaded_names)),
                "save_block_internals=True keeps everything on the device, so nothing is left "
                "to offload: name the internals to keep instead.",
            ),
            (
                self.save_inputs and self.save_block_internals is not True,
                f"save_inputs=True would keep nothing more: {_WEIGHTS_STAY} Drop it.",
            ),
            (
                self.prevent_cse is True and (keeps_all or thins),
                "prevent_cse=True can have no effect here: "
                + ("nothing is recomputed." if keeps_all else f"{loop} always recomputes."),
            ),
            (
                self.match_names == "any" and not names,
                "match_names='any' says how names are matched, but the policy has no names.",
            ),
        ]
        for broken, message in rules:
            if broken:
                raise ValueError(f"ScanCheckpointPolicy: {message}")


RematSpec: TypeAlias = ScanCheckpointPolicy | bool | str

_WEIGHTS_STAY = (
    "per-layer inputs are arguments of the loop and alive anyway; weights and inputs are never "
    "copied or offloaded by a policy (put them into host memory yourself with jax.device_put)."
)


def as_policy(spec: RematSpec, argument: str = "remat") -> ScanCheckpointPolicy:
    """The policy that `spec` is or stands for; `argument` is the caller's name for it."""
    if isinstance(spec, ScanCheckpointPolicy):
        return spec
    try:
        return ScanCheckpointPolicy.from_bool_or_str(spec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}={spec!r}: {error}") from None


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """A sentence that suggests the nearest of `known`, or ends the sentence before it."""
    close = difflib.get_close_matches(str(given), list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else "."


def _names(field: str, names: Any) -> tuple[str, ...]:
    """A collection of names as a tuple without repetitions; one string is one name."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Iterable):
        raise TypeError(f"{field}={names!r} is not a collection of names: write ['a_name'].")
    # A set has no order of its own; sorting it makes equal sets equal policies.
    names = tuple(sorted(names, key=str) if isinstance(names, (set, frozenset)) else names)
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{field} has {name!r}, which is not the name of a value.")
    return tuple(dict.fromkeys(names))


def _as_int(value: Any) -> Any:
    """NumPy's integers as Python's, so that equal policies are equal; the rest as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _check_choice(field: str, value: Any, choices: tuple, hint: str = "") -> None:
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return
    near = did_you_mean(value, [c for c in choices if isinstance(c, str)]) if not hint else ": "
    expected = ", ".join(map(repr, choices))
    raise ValueError(f"{field}={value!r}{near}{hint} Expected one of {expected}.")


def _check_count(field: str, count: Any, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{field} must be a whole number of at least {least}, not {count!r}.")
    if count < least:
        raise ValueError(f"{field}={count} is too few: at least {least} is needed.")
