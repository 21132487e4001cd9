"""What the papers say: facts and curves by edition and place, claims and their verdicts."""
