"""Chapter 02: prefill and decode apart."""
