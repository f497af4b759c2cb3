"""Assertions for test suites: what a backward pass keeps, and what it computes again."""

from ._assertions import assert_recomputes as assert_recomputes
from ._assertions import assert_saves as assert_saves
