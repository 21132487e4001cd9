"""How the process of a submission starts: a private folder of fixed size, then this package from its own place.

    python -I -P enter.py enter ORDER     mounts, and replaces itself with
    python -s -P enter.py answer ORDER    which imports the package and answers questions
    python -I -P enter.py probe ORDER     mounts, and ends

A script of the standard library only: the folder from which a teacher calls the grader is never searched for
modules. ORDER is JSON. The second interpreter needs no `-I`: its environment is what the grader wrote, with a
fixed `PYTHONHASHSEED`, so that a submission gets the same points twice.
"""

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NO_SUID, _NO_DEVICES, _NO_PROGRAMS, _RECURSIVE, _PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000


def mount_private(folder: str, size_bytes: int, entries: int) -> None:
    """Put a file system in memory over a folder, which only this process and its successors see.

    The kernel holds both bounds, whatever the permissions of folders are and whether files are still linked.

    Raises:
        OSError: when the kernel refuses a step.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.unshare(_NEW_USER | _NEW_MOUNTS), "make a user namespace")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    _must(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "separate its mounts")
    options = f"size={size_bytes},nr_inodes={entries + 1},mode=0700".encode()
    flags = _NO_SUID | _NO_DEVICES | _NO_PROGRAMS
    _must(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options), "mount a private folder")


def _must(result: int, step: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {step}: {os.strerror(code)}")


def _import_package(package: str) -> None:
    """Import the package of the grader itself, wherever it lies and whatever else has its name."""
    name = Path(package).name
    spec = importlib.util.spec_from_file_location(
        name, Path(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _main(step: str, text: str) -> None:
    order: dict[str, Any] = json.loads(text)
    folder = order["folder"]
    if step == "answer":
        _import_package(order["package"])
        from mooncake_lab.course.grading.given import install

        install(Path(order["package"]))
        from mooncake_lab.course.grading.candidate import start

        start(order)
        return
    if folder is not None:
        mount_private(folder, order["allowance"]["folder_bytes"], order["allowance"]["folder_entries"])
    if step == "enter":
        os.chdir(folder or "/")
        os.execv(sys.executable, [sys.executable, "-s", "-P", "-B", __file__, "answer", text])  # noqa: S606


if __name__ == "__main__":
    _main(*sys.argv[1:])
