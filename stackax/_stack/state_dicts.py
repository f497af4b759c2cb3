"""State dicts of layers, with keys as torch's `Sequential` has them: `prefix.index.rest`."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax.state_dict import StateDict, from_state_dict, to_state_dict, with_prefix

from .._loop.slicing import is_array
from .._policy.policy import did_you_mean


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
    needed = any(is_array(leaf) for leaf in jax.tree.leaves(templates))
    if needed and found != set(range(len(templates))):
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
    # Haliax would place NumPy arrays on the current mesh, which may be none, or abstract.
    state_dict = {
        key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in state_dict.items()
    }
    return [
        _into_layer(state_dict, with_prefix(prefix, str(i)), template)
        for i, template in enumerate(templates)
    ]


def _into_layer(state_dict: StateDict, prefix: str | None, template: Any) -> Any:
    try:
        layer = from_state_dict(template, state_dict, prefix)
    except KeyError as error:
        near = did_you_mean(error.args[0], state_dict)
        raise KeyError(f"the state dict lacks {error.args[0]!r}{near}") from None
    paths = jax.tree_util.tree_flatten_with_path(template)[0]
    for (path, old), new in zip(paths, jax.tree.leaves(layer), strict=True):
        if is_array(old) and old.shape != new.shape:
            raise ValueError(
                f"the state dict's {prefix}{jax.tree_util.keystr(path)} has shape {new.shape}, but "
                f"the stack needs {old.shape}."
            )
    return layer
