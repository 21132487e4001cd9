"""Chapter 07: what a KVCache store keeps."""
