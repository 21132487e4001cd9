"""Notebooks executed in parallel with papermill, each only when something it depends on changed.

The book, a batch of other parameters, and a class all go through here: `plan` says what there is to
do, `run` does it, and the executed notebook itself remembers what it was computed from.
"""

from mooncake_lab.core.extras import naming_extra

with naming_extra("book"):
    from mooncake_lab.book.rendering.plan import NotebookJob, plan
    from mooncake_lab.book.rendering.provenance import Provenance, write_provenance
    from mooncake_lab.book.rendering.run import Outcome, run

__all__ = ["NotebookJob", "Outcome", "Provenance", "plan", "run", "write_provenance"]
