"""Where the blocks live."""
