"""What arrives: traces read and checked, fetched, described, and generated."""
