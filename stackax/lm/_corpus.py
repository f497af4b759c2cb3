"""Text as bytes: what a byte-level language model trains on, and is judged by."""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

# Between files and before the first: a byte that no text has.
FILE_START = 0

# One byte in twenty is kept from training. By whole files where there are enough of them for the
# share to come out about right, which is the stricter test: nothing of a file was ever seen.
VALIDATION_SHARE = 20
FEWEST_FILES = 4 * VALIDATION_SHARE

# Left out of the standard library: what other packages put there, tests, which not every
# installation has, and tables of character codes, which would flatter the loss.
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes to train on and bytes to validate on, none of them in both.

    Args:
        train: The bytes to train on, a uint8 array of one dimension.
        validation: The bytes kept from training, a uint8 array of one dimension.
        files: Number of files that they come from.

    Example:
        >>> import numpy as np
        >>> from stackax.lm import Corpus
        >>> train, validation = np.array([97, 98], np.uint8), np.array([99], np.uint8)
        >>> Corpus(train, validation, files=1).train.tobytes()
        b'ab'
    """

    train: np.ndarray
    validation: np.ndarray
    files: int

    @property
    def fingerprint(self) -> str:
        """A hash in hexadecimal digits, by which two corpora can be told apart.

        Example:
            >>> from stackax.lm import corpus_of
            >>> corpus_of([b"some text"]).fingerprint == corpus_of([b"some test"]).fingerprint
            False
        """
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(self.validation.tobytes())
        return digest.hexdigest()


def read_corpus(paths: Sequence[str | os.PathLike] | None = None) -> Corpus:
    """Reads text files into a corpus, the same one for the same files.

    Args:
        paths: Files, taken as they are, and folders, of which every UTF-8 file is taken but
            hidden ones. None means the sources of Python's standard library on this machine,
            without its tests and its tables of character codes.

    Returns:
        The corpus, split as `corpus_of` splits.

    Raises:
        FileNotFoundError: if a path does not exist, a folder holds no text, or None is given and
            this Python has no sources of its library on disk.
        ValueError: if there are too few bytes to split.

    Example:
        >>> from stackax.lm import read_corpus
        >>> corpus = read_corpus()
        >>> len(corpus.train) > 10 * len(corpus.validation) > 0
        True
    """
    if paths is None:
        return corpus_of(path.read_bytes() for path in _standard_library())
    return corpus_of(text for path in paths for text in _read(Path(path)))


def corpus_of(texts: Iterable[bytes]) -> Corpus:
    """Splits texts into bytes to train on and bytes to validate on.

    A text that is given twice counts once. With 80 texts or more, every 20th text is for
    validation; with fewer, the last 20th of all bytes is. Each text is preceded by a zero byte.

    Args:
        texts: The texts, in the order that decides the split.

    Returns:
        The corpus.

    Raises:
        ValueError: if the texts together have fewer than 2 bytes.

    Example:
        >>> from stackax.lm import corpus_of
        >>> corpus = corpus_of([b"x" * 39])
        >>> corpus.train.size, corpus.validation.size
        (38, 2)
    """
    marked = [bytes([FILE_START]) + text for text in dict.fromkeys(texts)]
    if len(marked) >= FEWEST_FILES:
        train = _joined(t for i, t in enumerate(marked) if (i + 1) % VALIDATION_SHARE)
        return Corpus(train, _joined(marked[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]), len(marked))
    whole = _joined(marked)
    if whole.size < 2 + len(marked):
        raise ValueError(f"the text has {whole.size - len(marked)} bytes: give at least 2")
    cut = whole.size - max(1, whole.size // VALIDATION_SHARE)
    return Corpus(whole[:cut], whole[cut:], len(marked))


def _joined(texts: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)
    )
    if not found:
        raise FileNotFoundError(
            f"no sources of Python's standard library in {root}: give text of your own instead"
        )
    return found


def _read(path: Path) -> list[bytes]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a file or a folder of text")
    if not path.is_dir():
        return [path.read_bytes()]
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file, path))
    texts = [text for text in map(Path.read_bytes, files) if _is_text(text)]
    if not texts:
        raise FileNotFoundError(f"{path} holds no text: give a folder with UTF-8 files in it")
    return texts


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content) and "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False
