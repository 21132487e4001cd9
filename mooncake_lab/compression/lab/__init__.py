"""A small model that can be wrong, and the questions it is asked: how it is made, trained and examined."""
