"""Print every entry of an LMDB file, or die trying.

A file with flipped bytes can crash the process that maps it, so indexes of unknown health are walked in a process
of their own: `python index_walk.py FILE` writes length-prefixed keys and values to stdout. It imports nothing of
this package, to start quickly.
"""

import struct
import sys

import lmdb


def main(path: str) -> None:
    """Write every key and value of the file, each with its length as four bytes in front."""
    with lmdb.open(path, subdir=False, readonly=True, lock=False, create=False) as index, index.begin() as walk:
        out = sys.stdout.buffer
        for pair in walk.cursor():
            for part in pair:
                out.write(struct.pack("<I", len(part)))
                out.write(part)


if __name__ == "__main__":
    main(sys.argv[1])
