"""Chapter 13: every claim, gathered."""
