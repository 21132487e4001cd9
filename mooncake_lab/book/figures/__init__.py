"""One module a topic: tables and the paper's facts in, a matplotlib figure out."""
