"""The classroom: checks that run a student's policy through the contract tests."""
