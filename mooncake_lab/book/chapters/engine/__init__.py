"""Chapter 03: the real engine."""
