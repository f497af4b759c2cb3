"""Pictures of a memory bill and of what a loop does; they need `pip install 'stackax[plot]'`."""

from ._front import plot_front as plot_front
from ._residuals import plot_residuals as plot_residuals
from ._schedule import plot_schedule as plot_schedule
from ._timeline import plot_timeline as plot_timeline
from ._tradeoffs import plot_tradeoffs as plot_tradeoffs
