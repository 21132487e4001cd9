"""Chapter 01: what the traces hold."""
