"""Connections between processes that share a token: frames over TCP, and the listener that serves them."""
