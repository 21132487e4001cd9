"""One folder per chapter of the book.

`experiment` computes tables, `claims` judges them beside the papers, `figures` draws them.
"""

from mooncake_lab.core.extras import need

need("stats")
