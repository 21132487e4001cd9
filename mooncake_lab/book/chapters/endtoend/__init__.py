"""Chapter 10: whole requests beside vLLM."""
