"""Fetching a released trace from its authors, whole and unchanged or not at all."""

import sys
from pathlib import Path

from mooncake_lab.workload.locate import cache_folder
from mooncake_lab.workload.releases import release_of


def fetch_trace(name: str, *, folder: Path | None = None, url: str | None = None, force: bool = False) -> Path:
    """Fetch a released trace, check its SHA-256, and return its path; a file already there is only checked.

    Args:
        name: a workload name.
        folder: where to put it; the user's cache by default.
        url: another address of the same file, such as a mirror.
        force: replace a file of that name that is not the released one.

    Raises:
        ConnectionError: when the file cannot be fetched; nothing is left behind.
        ValueError: when the workload is unknown, the address is not http:// or https://, or the content is not the
            released one; such content is not kept.
        OSError: when the folder cannot be made.
    """
    release = release_of(name)
    folder = cache_folder() if folder is None else folder
    path = folder / release.file_name
    if path.exists() and not force:
        release.check(path)
        return path
    address = url or release.url
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address!r} is not an address to fetch from; allowed are http:// and https://")
    folder.mkdir(parents=True, exist_ok=True)
    # here and not above: it imports a progress bar that complains in every notebook that has no widgets
    import pooch

    try:
        # pooch downloads beside the destination and moves the file there only when its digest is right
        pooch.retrieve(
            address, f"sha256:{release.sha256}", release.file_name, folder, progressbar=sys.stderr.isatty()
        )
    except ValueError as error:
        raise ValueError(
            f"what {address} sent is not the released {release.label} trace and was not kept ({error});"
            " try again, or name another address of the same file"
        ) from error
    except OSError as error:
        raise ConnectionError(
            f"could not fetch {address} ({error}); connect to the internet, or put the file"
            f" {release.file_name} in a folder named by MOONCAKE_LAB_DATA"
        ) from error
    return path
