"""What a chapter is called in titles, figures and tables: the number of its file, or a letter for an appendix."""

from typing import Final

APPENDICES: Final = {"14_compression": "A"}
"""Chapters behind the last one, by their stems."""


def chapter_number(stem: str) -> str:
    """The number of a chapter, such as 9 for `09_placement`, or the letter of an appendix.

    Raises:
        ValueError: when the stem does not begin with a number.
    """
    number, _, _ = stem.partition("_")
    if not number.isdigit():
        raise ValueError(f"{stem!r} is not a chapter; chapters are called NN_topic")
    return APPENDICES.get(stem, str(int(number)))
