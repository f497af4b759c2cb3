"""Checkpoints: one file that holds the arrays of a pytree and says what they are."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

T = TypeVar("T")
FILE = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
ABOUT = "about"


def save_checkpoint(directory: str | os.PathLike, tree: Any, about: dict[str, Any]) -> None:
    """Writes the arrays of a pytree into `directory`, in place of what was saved there before.

    The file is complete before it gets its name, so whatever stops the program leaves either the
    old checkpoint or the new one.

    Args:
        directory: Where `checkpoint.safetensors` goes; it is made where it does not exist.
        tree: The pytree. Its arrays, of any shape, are saved, the rest is up to whoever loads it.
        about: What `read_about` shall tell, anything that JSON can hold.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from stackax.lm import load_checkpoint, read_about, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, {"w": jnp.arange(3)}, about={"step": 7})
        >>> read_about(folder), load_checkpoint(folder, {"w": jnp.zeros(3, int)})["w"].tolist()
        ({'step': 7}, [0, 1, 2])
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named_arrays(tree).items()}
    draft = directory / f".{FILE}.{os.getpid()}"
    try:
        safetensors.numpy.save_file(arrays, draft, metadata={ABOUT: json.dumps(about)})
        with open(draft, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, directory / FILE)
    finally:
        draft.unlink(missing_ok=True)


def read_about(directory: str | os.PathLike) -> dict[str, Any]:
    """What `save_checkpoint` was told about the arrays in `directory`, without reading them.

    Args:
        directory: Where the checkpoint is.

    Returns:
        The `about` of the last `save_checkpoint`.

    Raises:
        FileNotFoundError: if `directory` holds no checkpoint.
        ValueError: if the file there is not one of these checkpoints.

    Example:
        >>> import tempfile
        >>> from stackax.lm import read_about, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, {}, about={"step": 7})
        >>> read_about(folder)
        {'step': 7}
    """
    with _opened(directory) as file:
        about = (file.metadata() or {}).get(ABOUT)
    if about is None:
        raise ValueError(f"{Path(directory) / FILE} was not written by stackax")
    return json.loads(about)


def load_checkpoint(directory: str | os.PathLike, like: T) -> T:
    """The pytree `like`, with the arrays that are saved in `directory`.

    Args:
        directory: Where the checkpoint is.
        like: A pytree of the structure, shapes and dtypes that were saved, of arrays or
            `jax.ShapeDtypeStruct`s.

    Returns:
        The pytree, with saved arrays for those of `like`, of their shapes and dtypes.

    Raises:
        FileNotFoundError: if `directory` holds no checkpoint.
        ValueError: if an array is missing, left over, or of another shape or dtype; or the file
            is not a checkpoint.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from stackax.lm import load_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, {"w": jnp.zeros(3)}, about={})
        >>> load_checkpoint(folder, {"w": jnp.ones(4)})
        Traceback (most recent call last):
            ...
        ValueError: the checkpoint's ['w'] is float32[3], but float32[4] is needed
    """
    wanted = _named_arrays(like)
    with _opened(directory) as file:
        _check_names(set(file.keys()), set(wanted))
        saved = {name: file.get_tensor(name) for name in wanted}
    for name, leaf in wanted.items():
        if (saved[name].shape, saved[name].dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"the checkpoint's {name} is {_spell(saved[name])}, but {_spell(leaf)} is needed"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(saved[_name(path)]) if _is_array(leaf) else leaf, like
    )


def set_checkpoint_aside(directory: str | os.PathLike) -> Path | None:
    """Renames the checkpoint in `directory`, so that a new run does not replace it.

    Args:
        directory: Where the checkpoint may be.

    Returns:
        Its new path, or None where there was no checkpoint. One set aside before is replaced.

    Example:
        >>> import tempfile
        >>> from stackax.lm import save_checkpoint, set_checkpoint_aside
        >>> folder = tempfile.mkdtemp()
        >>> set_checkpoint_aside(folder) is None
        True
        >>> save_checkpoint(folder, {}, about={})
        >>> set_checkpoint_aside(folder).name
        'checkpoint.previous.safetensors'
    """
    current, previous = Path(directory) / FILE, Path(directory) / PREVIOUS
    if not current.exists():
        return None
    os.replace(current, previous)
    return previous


def _opened(directory: str | os.PathLike):
    path = Path(directory) / FILE
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint in {directory}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete checkpoint: {error}") from error


def _named_arrays(tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): leaf for path, leaf in leaves if _is_array(leaf)}


def _name(path) -> str:
    return jax.tree_util.keystr(path)


def _is_array(leaf) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray)


def _check_names(saved: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - saved):
        raise ValueError(f"the checkpoint lacks {len(missing)} arrays, the first is {missing[0]}")
    if extra := sorted(saved - wanted):
        raise ValueError(
            f"the checkpoint has {len(extra)} arrays too many, the first is {extra[0]}"
        )


def _spell(x) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"
