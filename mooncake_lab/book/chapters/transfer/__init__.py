"""Chapter 08: moving KVCache."""
