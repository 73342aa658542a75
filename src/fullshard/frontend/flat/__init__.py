"""``FullyShardedDataParallel``: the flat face."""
