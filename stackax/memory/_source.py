"""The line of the user's code that an operation comes from."""

import os
import site
import sysconfig
from pathlib import Path

import equinox
import haliax
from jax.extend.core import JaxprEqn

from .. import _jax

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Where loops, policies and containers are: they run a user's code, and are not it.
_MACHINERY = tuple(
    _PACKAGE + folder for folder in ("_loop", "_policy", "_stack", "memory", "testing", "_jax")
)
# Their lines say what is multiplied, and nothing of why.
_LIBRARIES = tuple(str(Path(*module.__path__)) + os.sep for module in (equinox, haliax))
_INSTALLED = tuple(
    os.path.join(path, "") for path in {sysconfig.get_path("purelib"), *site.getsitepackages()}
)


def source_of(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)` of the inmost call in the user's own code, or in our blocks.

    Code of installed packages is only named where there is no other; "" means that none is known.
    """
    frames = [f for f in _jax.user_frames(eqn) if not f[0].startswith(_MACHINERY + _LIBRARIES)]
    own = [f for f in frames if f[0].startswith(_PACKAGE) or not f[0].startswith(_INSTALLED)]
    for path, line, function in own or frames:
        return f"{_short(path)}:{line} ({function.split('.')[-1]})"
    return ""


def _short(path: str) -> str:
    """The file in its folder for our blocks, whose files have common names; else the file."""
    return "/".join(path.split(os.sep)[-2 if path.startswith(_PACKAGE) else -1 :])
