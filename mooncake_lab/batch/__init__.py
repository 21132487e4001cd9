"""Notebooks executed in parallel with papermill, each only when something it depends on changed."""
