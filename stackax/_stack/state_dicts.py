"""State dicts of layers, with keys as torch's `Sequential` has them: `prefix.index.rest`."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax.state_dict import StateDict, from_state_dict, to_state_dict, with_prefix


def of_layers(blocks: Iterable[Any], prefix: str | None) -> StateDict:
    """The arrays of the blocks, each block's under its index."""
    arrays: StateDict = {}
    for i, block in enumerate(blocks):
        arrays.update(to_state_dict(block, with_prefix(prefix, str(i))))
    return arrays


def into_layers(state_dict: StateDict, prefix: str | None, templates: Sequence[Any]) -> list[Any]:
    """Blocks like the templates, with arrays from the state dict.

    Raises:
        ValueError: The state dict has more or fewer layers than there are templates.
        KeyError: A layer lacks an array.
    """
    pattern = re.compile(re.escape(with_prefix(prefix, "") or "") + r"(\d+)(\.|$)")
    found = {int(match[1]) for key in state_dict if (match := pattern.match(key))}
    if found and found != set(range(len(templates))):
        missing = sorted(set(range(len(templates))) - found)
        extra = sorted(found - set(range(len(templates))))
        raise ValueError(
            f"the stack has {len(templates)} layers, but the state dict"
            + (f" under {prefix!r}" if prefix else "")
            + (f" lacks layers {missing}" if missing else "")
            + (" and" if missing and extra else "")
            + (f" has layers {extra} too many" if extra else "")
            + ": make the stack with as many layers as the state dict has."
        )
    if jax.sharding.get_abstract_mesh().empty:
        # Haliax places NumPy arrays on the current mesh, and takes several devices for one.
        state_dict = {
            key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in state_dict.items()
        }
    return [
        from_state_dict(template, state_dict, with_prefix(prefix, str(i)))
        for i, template in enumerate(templates)
    ]
