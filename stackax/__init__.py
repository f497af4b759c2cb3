"""Deep stacks of layers for JAX: scanned, rematerialised by a policy, and paid for knowingly."""

from ._install import check_haliax_distribution as _check_haliax_distribution

_check_haliax_distribution()

from ._stack.stacked import Stacked as Stacked
from ._stack.block_seq import BlockSeq as BlockSeq
from ._stack.base import BlockFoldable as BlockFoldable
from ._loop.loop import scan as scan, fold as fold, map as map
from ._loop.marks import per_layer as per_layer, shared as shared, layer_index as layer_index
from ._policy.policy import ScanCheckpointPolicy as ScanCheckpointPolicy
from ._policy.names import checkpoint_name as checkpoint_name
from . import stream as stream

__version__ = "0.1.0"

__all__ = [
    "Stacked",
    "BlockSeq",
    "BlockFoldable",
    "scan",
    "fold",
    "map",
    "per_layer",
    "shared",
    "layer_index",
    "ScanCheckpointPolicy",
    "checkpoint_name",
    "stream",
]
