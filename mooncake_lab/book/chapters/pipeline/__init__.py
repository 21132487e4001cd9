"""Chapter 06: pipelines of stages."""
