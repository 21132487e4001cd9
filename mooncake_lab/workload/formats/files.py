"""The records of a file: lines, rows of a table, or the elements of a JSON array; plain, gzip or Zstandard.

A file is read in pieces, so that its size does not matter.
"""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, cast

_PIECE_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 1 << 16
"""As much of a file says what its format is."""
_LONGEST_RECORD_BYTES: Final = 1 << 28
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_FOREIGN: Final[Mapping[bytes, str]] = MappingProxyType(
    {
        b"\xef\xbb\xbf": "begins with a byte order mark (BOM); save it as UTF-8 without one",
        b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
        b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
        b"version https://git-lfs": "is a Git LFS pointer, not the file that it stands for; run `git lfs pull`",
        _GZIP_MAGIC: "is compressed twice, within with gzip; unpack it once",
        _ZSTD_MAGIC: "is compressed twice, within with Zstandard; unpack it once",
        b"\xfd7zXZ": "is compressed with xz; allowed are plain text, gzip and Zstandard",
        b"BZh": "is compressed with bzip2; allowed are plain text, gzip and Zstandard",
        b"PK\x03\x04": "is a zip archive; unpack it, or use gzip",
        b"PAR1": "is a Parquet file; allowed is one JSON object a line",
        b"<!DOCTYPE": "is a page of HTML, as a failed download leaves it; allowed is one JSON object a line",
        b"<html": "is a page of HTML, as a failed download leaves it; allowed is one JSON object a line",
    }
)
"""What other files begin with, and what to do about each."""
_TABLE: Final = re.compile(rb"""\s*['"]?[A-Za-z_][\w .()/-]*+['"]?[ ]*[,;\t|]""")
"""Tables begin with the name of a column and what separates it from the next; no JSON begins with a letter."""
_OBJECT: Final = re.compile(rb"^\s*\{", re.MULTILINE)
_BETWEEN: Final = re.compile(r"[\s,\[\]]*")
"""What may stand between the objects of a file."""
_KEY: Final = re.compile(rb'"(\w+)"\s*:')

Progress = Callable[[int, int], None]
"""Called with the bytes that were read and those of the whole file, 0 where that is not known."""


class TraceError(ValueError):
    """A trace file that cannot be used; the message names file, line, field, value and what is allowed."""


class TraceFile:
    """A file that is being read: what it begins with, and its pieces.

    Args:
        path: of the file.
        pieces: all of it, decompressed.

    Raises:
        TraceError: when it is a file of another kind.
    """

    def __init__(self, path: Path, pieces: Iterator[bytes]) -> None:
        self.path = path
        self.head = b""
        while len(self.head) < _HEAD_BYTES and (piece := next(pieces, b"")):
            self.head += piece
        self._pieces = chain([self.head], pieces)
        for beginning, sentence in _FOREIGN.items():
            if self.head.startswith(beginning):
                raise TraceError(f"{path} {sentence}")

    @property
    def is_table(self) -> bool:
        """Whether it begins with the names of columns."""
        return bool(_TABLE.match(self.head)) and not _OBJECT.search(self.head)

    @property
    def is_array(self) -> bool:
        """Whether it is one JSON array, as far as its beginning says."""
        return bool(re.match(rb"\s*\[\s*\{", self.head))

    @property
    def has_a_record_a_line(self) -> bool:
        """Whether its first line is a JSON object; where it is not, an object may end lines later."""
        first = self.head.lstrip().partition(b"\n")[0].rstrip()
        return first.startswith(b"{") and first.endswith(b"}")

    @property
    def columns(self) -> list[str]:
        """The names of a table's columns."""
        first = self.head.lstrip().partition(b"\n")[0].decode(errors="replace")
        return [name.strip() for name in next(csv.reader([first]), [])]

    @property
    def keys(self) -> frozenset[str]:
        """The names of fields, of nested ones too, in the beginning of its first object."""
        start = _OBJECT.search(self.head)
        if start is None and not self.is_array:
            return frozenset()
        begin = self.head[start.start() if start else 0 :]
        line = begin.lstrip().partition(b"\n")[0]
        return frozenset(key.decode() for key in _KEY.findall(line if len(line) > 2 else begin))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers from 1.

        Raises:
            TraceError: when one is too long.
        """
        number, rest = 0, b""
        for piece in self._pieces:
            parts = (rest + piece).split(b"\n")
            rest = parts.pop()
            for raw in parts:
                number += 1
                if raw and not raw.isspace():
                    yield number, raw
            if len(rest) > _LONGEST_RECORD_BYTES:
                raise TraceError(
                    f"{self.path}:{number + 1}: the line is longer than {_LONGEST_RECORD_BYTES} bytes;"
                    " allowed is one record a line"
                )
        if rest and not rest.isspace():
            yield number + 1, rest

    def objects(self) -> Iterator[tuple[int, bytes]]:
        """JSON objects one after another, or those of an array, with the numbers of the lines that they begin in.

        Raises:
            TraceError: when what comes next is no JSON object.
        """
        decoder = json.JSONDecoder(parse_constant=_no_number)
        pieces, text, at, number, more = self._texts(), "", 0, 1, True
        while True:
            between = cast("re.Match[str]", _BETWEEN.match(text, at))
            number += text.count("\n", at, between.end())
            at = between.end()
            if at == len(text) and not more:
                return
            try:
                _, end = decoder.raw_decode(text, at) if text.startswith("{", at) else (None, at)
            except (ValueError, RecursionError):
                end = at
            if end > at:
                yield number, text[at:end].encode()
                number += text.count("\n", at, end)
                at = end
                continue
            if not more or (at < len(text) and text[at] != "{"):
                raise TraceError(f"{self.path}:{number}: {text[at : at + 40]!r} is no JSON object")
            text, at = text[at:], 0
            if len(text) > _LONGEST_RECORD_BYTES:
                raise TraceError(f"{self.path}:{number}: no object ends within {_LONGEST_RECORD_BYTES} bytes")
            # twice as much each time, so that a long object is not looked at too often
            fresh = "".join(islice(pieces, 1 + len(text) // _PIECE_BYTES))
            more, text = bool(fresh), text + fresh

    def table(self) -> Iterator[tuple[int, list[str]]]:
        """The rows of a table below its header, with the numbers of the lines that they end in.

        Raises:
            TraceError: when a row is no text, or its quotes are wrong.
        """
        reader = csv.reader(self._text_lines(), strict=True)
        try:
            rows = ((reader.line_num, row) for row in reader if any(row))
            next(rows, None)
            yield from rows
        except csv.Error as error:
            raise TraceError(f"{self.path}:{reader.line_num}: {error}; allowed is a table in CSV") from None

    def _text_lines(self) -> Iterator[str]:
        rest = b""
        for piece in self._pieces:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace") + "\n"
        if rest:
            yield rest.decode("utf-8", "replace")

    def _texts(self) -> Iterator[str]:
        """The pieces as text; a character may not be cut."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in self._pieces:
                yield decoder.decode(piece)
        except UnicodeDecodeError as error:
            raise TraceError(f"{self.path} is no UTF-8 ({error.reason}); save it as UTF-8") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


@contextmanager
def opened(path: Path, progress: Progress | None = None) -> Generator[TraceFile]:
    """A file to read, decompressed; what packs it is known by its content.

    Raises:
        TraceError: when it is damaged, or packed with what is not available here.
        OSError: when it cannot be read.
    """
    with path.open("rb") as raw:
        total = path.stat().st_size
        pieces = _read_in_pieces(path, raw)
        yield TraceFile(path, pieces if progress is None else _watched(pieces, raw, total, progress))


def _watched(pieces: Iterable[bytes], raw: BinaryIO, total: int, progress: Progress) -> Iterator[bytes]:
    for piece in pieces:
        progress(raw.tell() if raw.seekable() else 0, total)
        yield piece
    progress(total, total)


def _read_in_pieces(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    magic = cast("Any", raw).peek(4)[:4]
    kind, stream, errors = "", cast("Any", raw), cast("tuple[type[Exception], ...]", ())
    if magic.startswith(_GZIP_MAGIC):
        kind, stream, errors = "gzip", gzip.GzipFile(fileobj=raw), (OSError, EOFError, zlib.error)
    elif magic == _ZSTD_MAGIC:
        zstd = _zstd(path)
        kind, stream, errors = "Zstandard", zstd.ZstdFile(raw), (zstd.ZstdError, EOFError)
    while True:
        try:
            piece = stream.read(_PIECE_BYTES)
        except errors as error:
            raise TraceError(f"{path} is a damaged {kind} file: {error}; allowed is a complete one") from error
        if not piece:
            return
        yield piece


def _zstd(path: Path) -> Any:
    """The standard library's module, or its port to earlier versions of Python."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise TraceError(
        f"{path} is compressed with Zstandard, which needs Python 3.14 or the package backports.zstd"
        " (pip install 'mooncake-lab[zstd]'); plain text and gzip need nothing"
    )
