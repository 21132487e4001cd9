"""Chapter 12: the simulator held against the live cluster."""
