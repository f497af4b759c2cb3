"""The memory bill of a step: before it compiles, under a budget, and as the compiler has it."""

from ._bytes import parse_bytes as parse_bytes
from ._bytes import show_bytes as show_bytes
from ._explain import Report as Report
from ._explain import explain as explain
from ._measure import Measurement as Measurement
from ._measure import measure as measure
from ._peak import Moment as Moment
from ._peak import Peak as Peak
from ._plan import Plan as Plan
from ._plan import plan as plan
from ._program import Argument as Argument
from ._residuals import Residual as Residual
from ._search import Point as Point
from ._waste import Finding as Finding
