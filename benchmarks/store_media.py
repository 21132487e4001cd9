"""How fast the store's media are beside the plainest way to move the same bytes; the same as `bench store`."""  # noqa: INP001  # scripts, not a package

import typer

from mooncake_lab.cli.store import bench_store

if __name__ == "__main__":
    typer.run(bench_store)
