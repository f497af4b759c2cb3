"""Where the weights of a stack come from, fetched one layer ahead of their use."""

from ._host import from_host as from_host
from ._shards import from_shards as from_shards
