"""Chapter 00: one request, and then a burst, followed through the live cluster."""
