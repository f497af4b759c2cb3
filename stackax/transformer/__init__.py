"""Decoder-only transformer blocks on named axes.

Axes, beside those of all families (`"layers"`, `"position"`, `"embed"`, `"vocab"`):

| axis | name | meaning |
|---|---|---|
| `Heads` | `"heads"` | query heads |
| `KVHeads` | `"kv_heads"` | key and value heads; each serves `Heads / KVHeads` query heads |
| `HeadDim` | `"head_dim"` | features of one head |
| `Mlp` | `"mlp"` | hidden features of the gated MLP |
"""

from ._attend import attend as attend
from ._attention import Attention as Attention
from ._block import TransformerBlock as TransformerBlock
from ._config import TransformerConfig as TransformerConfig
from ._mlp import GatedMlp as GatedMlp
from ._mlp import swiglu as swiglu
from ._rotary import apply_rotary as apply_rotary
