"""Runs Haliax's own tests of its stack against ours: `python tests/haliax_suite.py PATH_TO_CLONE`.

Haliax's `test_scan.py`, `test_state_dict.py` and `test_tree_util.py` are copied from a clone of
its repository to a temporary folder, with the import of the stack's classes swapped for ours. Tests
that patch Haliax's own internals, or read the private structure of its programs, are expected to
fail.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ("test_scan.py", "test_state_dict.py", "test_tree_util.py")
OURS = ("Stacked", "BlockSeq", "BlockFoldable", "ScanCheckpointPolicy")


def swap_imports(source: str) -> str:
    """The source of a test file with `Stacked` and its kin imported from stackax.

    Args:
        source: Python source that imports from `haliax.nn.scan` or says `hax.nn.Stacked`.

    Returns:
        The same source; names that are not ours still come from Haliax.
    """

    def split(match: re.Match) -> str:
        names = [name.strip() for name in match.group(1).split(",")]
        theirs = [name for name in names if name not in OURS]
        ours = [name for name in names if name in OURS]
        lines = [f"from haliax.nn.scan import {', '.join(theirs)}"] if theirs else []
        lines += [f"from stackax import {', '.join(ours)}"] if ours else []
        return "\n".join(lines)

    source = re.sub(r"from haliax\.nn\.scan import ([^\n(]+)", split, source)
    names = "|".join(OURS)
    qualified = re.sub(rf"\b(?:hax|haliax)\.nn\.({names})\b", r"stackax.\1", source)
    if qualified != source:
        qualified = "import stackax\n" + qualified
    return qualified


def main(clone: str, *arguments: str) -> int:
    """Copies the files, runs pytest on them, and returns its exit status.

    Args:
        clone: a folder that holds Haliax's `tests/`.
        *arguments: passed on to pytest.
    """
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            source = (Path(clone) / "tests" / name).read_text()
            (Path(folder) / name).write_text(swap_imports(source))
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, folder, *arguments]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
