"""One folder per chapter of the book.

`experiment` computes tables, `claims` judges them beside the papers, `figures` draws them.
"""
