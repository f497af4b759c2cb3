"""The clash of `haliax` with `marin-haliax`, met with made-up distributions."""

import sys
from importlib import metadata

import pytest

from stackax._install import check_haliax_distribution

CURE = "pip uninstall -y haliax && pip install --force-reinstall --no-deps marin-haliax"


class _Installed(metadata.DistributionFinder):
    """A finder to which exactly the named distributions are installed."""

    def __init__(self, *names: str):
        self.names = names

    def find_distributions(self, context=metadata.DistributionFinder.Context()):
        return [_Bare() for name in self.names if context.name in (None, name)]

    def find_spec(self, fullname, path=None, target=None):
        return None


class _Bare(metadata.Distribution):
    def read_text(self, filename):
        return None

    def locate_file(self, path):
        raise FileNotFoundError(path)


def _install_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    others = [finder for finder in sys.meta_path if not hasattr(finder, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", [_Installed(*names), *others])


def test_both_distributions_raise_and_print_the_cure(monkeypatch):
    _install_only(monkeypatch, "haliax", "marin-haliax")
    with pytest.raises(ImportError, match="beside 'marin-haliax'") as raised:
        check_haliax_distribution()
    assert CURE in str(raised.value)


def test_the_old_distribution_alone_raises_and_prints_the_cure(monkeypatch):
    _install_only(monkeypatch, "haliax")
    with pytest.raises(ImportError, match="'haliax' is installed. stackax needs") as raised:
        check_haliax_distribution()
    assert CURE in str(raised.value)


@pytest.mark.parametrize("names", [("marin-haliax",), ()], ids=["successor alone", "neither"])
def test_without_the_old_distribution_nothing_is_raised(monkeypatch, names):
    _install_only(monkeypatch, *names)
    check_haliax_distribution()


def test_importing_stackax_looks_at_the_distributions(monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: _Bare())
    for name in [name for name in sys.modules if name.partition(".")[0] == "stackax"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="stackax needs 'marin-haliax'"):
        __import__("stackax")
