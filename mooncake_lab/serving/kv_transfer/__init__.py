"""KVCache between workers: layer by layer to the decode worker, and prefix blocks from one that holds them."""
