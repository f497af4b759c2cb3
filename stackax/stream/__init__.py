from ._host import from_host as from_host
from ._shards import from_shards as from_shards
