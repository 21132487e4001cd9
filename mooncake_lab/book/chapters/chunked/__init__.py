"""Chapter 04: chunked prefill."""
