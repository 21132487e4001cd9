"""Grading: a submission runs confined and answers questions; the grader checks the answers."""
