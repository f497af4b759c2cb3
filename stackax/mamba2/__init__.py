"""Mamba-2 blocks on named axes, and the arithmetic of their state space duality.

Axes, beside those of all families (`"layers"`, `"position"`, `"embed"`, `"vocab"`):

| axis | name | meaning |
|---|---|---|
| `Heads` | `"heads"` | heads of the state space |
| `HeadDim` | `"head_dim"` | features of one head |
| `Groups` | `"groups"` | groups of heads, each with its own B and C |
| `State` | `"state"` | the state of each feature of a head |
| `Inner` | `"inner"` | features of all heads |
| `InProj` | `"in_proj"` | what the projection in makes: z, x, B, C and dt, in this order |
| `ConvChannels` | `"conv_channels"` | what the convolution sees: x, B and C |
| `Tap` | `"tap"` | positions that the convolution sees, the oldest first |
| `Window` | `"window"` | those of them before the present one, which a cache keeps |
"""

from ._block import Mamba2Block as Mamba2Block
from ._cache import Mamba2Cache as Mamba2Cache
from ._config import Mamba2Config as Mamba2Config
from ._conv import causal_conv as causal_conv
from ._conv import causal_conv_step as causal_conv_step
from ._gated_norm import gated_rms_norm as gated_rms_norm
from ._mixer import Mamba2Mixer as Mamba2Mixer
from ._named_ssd import named_ssd as named_ssd
from ._norm import RmsNorm as RmsNorm
from ._ssd import ssd as ssd
from ._ssd import ssd_step as ssd_step
