"""Chapter 14: smaller KVCaches."""
