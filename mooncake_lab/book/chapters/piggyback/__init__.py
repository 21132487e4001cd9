"""Chapter 05: decode-maximal batching."""
