"""Chapter 09: which instance serves which request."""
