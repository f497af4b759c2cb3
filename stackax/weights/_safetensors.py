"""Folders with a config and safetensors files, in one piece or in shards."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

CONFIG = "config.json"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Tensors:
    """The tensors of a checkpoint, read one by one, and a memory of which were."""

    def __init__(self, files: dict[str, Any]):
        self._files = files
        self._unread = set(files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it.

        Args:
            name: The tensor.

        Raises:
            ValueError: if there is no such tensor.
        """
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor, in the dtype that it was saved in.

        Args:
            name: The tensor.

        Raises:
            ValueError: if there is no such tensor.
        """
        tensor = self._file_of(name).get_tensor(name)
        self._unread.discard(name)
        return tensor

    def check_all_read(self) -> None:
        """Refuses a checkpoint of which something was left over.

        Raises:
            ValueError: if a tensor was never read.
        """
        if self._unread:
            raise ValueError(
                f"the checkpoint has {len(self._unread)} tensors that the model has no place for: "
                f"{_some(self._unread)}"
            )

    def _file_of(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(
                f"the checkpoint has no tensor {name!r}, which the model needs; it has "
                f"{_some(self._files)}"
            )
        return self._files[name]


def read_config(directory: str | os.PathLike) -> dict[str, Any]:
    """What `config.json` in `directory` says.

    Args:
        directory: Where the checkpoint is.

    Returns:
        Its keys and values.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = Path(directory) / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"there is no {CONFIG} in {directory}")
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def opened(directory: str | os.PathLike) -> Iterator[Tensors]:
    """The tensors in `directory`, of one file or of those that an index lists.

    Args:
        directory: Where the checkpoint is.

    Yields:
        The tensors.

    Raises:
        FileNotFoundError: if there are none, or a shard is missing.
        ValueError: if the index names a tensor that its shard has not.
    """
    directory = Path(directory)
    with ExitStack() as stack:
        files = {}
        for name in _files_in(directory):
            path = directory / name
            if not path.exists():
                raise FileNotFoundError(f"{INDEX} lists {name}, which is not in {directory}")
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            files |= {tensor: file for tensor in file.keys()}
        _check_index(directory, files)
        yield Tensors(files)


def write(
    directory: str | os.PathLike, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Writes `config.json` and `model.safetensors` into `directory`.

    Args:
        directory: Where they go; it is made where it does not exist.
        config: Anything that JSON can hold.
        tensors: The tensors by name.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # The mark by which transformers knows that the tensors are laid out as torch's.
    safetensors.numpy.save_file(contiguous, directory / FILE, metadata={"format": "pt"})


def _files_in(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(_index(directory).values()))
    if (directory / FILE).exists():
        return [FILE]
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    cure = (
        f"; {pickled[0]} is a pickle of torch: convert it with safetensors.torch.save_file"
        if pickled
        else ""
    )
    raise FileNotFoundError(f"there is neither {FILE} nor {INDEX} in {directory}{cure}")


def _check_index(directory: Path, files: dict[str, Any]) -> None:
    if (directory / INDEX).exists():
        missing = set(_index(directory)) - set(files)
        if missing:
            raise ValueError(f"{INDEX} lists tensors that no file has: {_some(missing)}")


def _index(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]


def _some(names) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
