"""What is kept: block stores, eviction policies, replay of a trace through a cache."""
