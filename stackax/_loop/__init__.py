"""How a block is run once per layer."""
