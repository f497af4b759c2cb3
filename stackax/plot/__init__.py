"""Pictures of a memory bill, for a screen or a paper; they need `pip install 'stackax[plot]'`."""

from ._front import plot_front as plot_front
from ._residuals import plot_residuals as plot_residuals
from ._timeline import plot_timeline as plot_timeline
from ._tradeoffs import plot_tradeoffs as plot_tradeoffs
