"""Chapter 11: early rejection."""
