"""Warnings of the library, as notes below what a command prints."""

import contextlib
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def notes() -> Iterator[None]:
    """Prints the library's warnings inside it on standard error, each once, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning):
        print(f"note: {' '.join(text.split())}", file=sys.stderr)
    for warning in caught:
        if warning.category is not UserWarning:
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
