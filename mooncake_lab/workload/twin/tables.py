"""The quantile tables behind the twins: percent first, then what that share of the requests does not exceed.

A module of data, set in rows by hand because a number a line would hide the shape of a distribution. Measured
tables were read off the released traces, where one request follows another if it reuses more of it than the
common first block.
"""

from typing import Final

from mooncake_lab.workload.twin.drafts import Quantiles

# fmt: off
# -- conversation: measured
FIRST_PROMPT_TOKENS: Final = Quantiles(
    (0, 2, 5, 7.5, 10, 15, 17.5, 20, 22, 25, 27.5, 30, 32.5, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80,
     85, 87.5, 90, 92.5, 94, 95, 96, 97, 97.5, 98, 98.5, 99, 99.3, 99.6, 99.8, 100),
    (891, 895, 897, 900, 905, 943, 1011, 1092, 1183, 1336, 1500, 1756, 2137, 2767, 3913, 4587, 5264,
     6187, 7418, 8827, 10770, 13056, 15871, 19436, 22171, 25559, 30511, 34382, 38493, 43057, 51772,
     58636, 67125, 74821, 89867, 98715, 113117, 118462, 126195),
)
"""Prompts of which no more than the system prompt was known."""
ANSWER_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100),
    (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 891, 1118, 1567, 2000),
)
"""Answers; near enough the same for short and long prompts."""
ASK_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100),
    (-1197, -57, -12, -2, 7, 10, 13, 18, 26, 42, 95, 294, 483, 678, 787, 899, 1000),
)
"""Next prompt less prompt and answer before it, up to 1,000; negative where part of the answer was dropped."""
PASTE_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100),
    (1002, 1111, 1289, 1867, 2594, 3406, 3938, 4397, 5345, 6634, 8244, 12415, 17204, 25404, 34547,
     40000),
)
"""The same above 1,000: documents and search results. Ends at 40,000, which keeps the mean: the few longer pastes
(one of 91,467) would stretch the last straight line too far."""
EDIT_KEEPS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100),
    (0.015, 0.029, 0.038, 0.055, 0.087, 0.125, 0.178, 0.25, 0.355, 0.457, 0.619, 0.898, 0.948,
     0.978, 0.985, 0.993),
)
"""Share of the old prompt's full blocks that an edit keeps, weighted by the old prompt's length."""
EDIT_LENGTH: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100),
    (0.174, 0.367, 0.471, 0.609, 0.705, 0.811, 0.892, 0.956, 1.004, 1.037, 1.1, 1.257, 1.419, 1.826,
     2.501, 4),
)
"""New prompt over old prompt after an edit, weighted likewise: long prompts shrink. Ends at 4 for the mean."""

# -- synthetic: measured, but for the two tables of questions
CHAT_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 100),
    (13, 13, 17, 20, 25, 30, 37, 52, 83, 146, 346, 770, 1108, 1445, 2009),
)
"""Prompts below 2,048 tokens."""
CHAT_ANSWER_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 100),
    (1, 4, 11, 28, 89, 140, 203, 253, 302, 352, 437, 584, 715, 777, 842),
)
"""Answers to them."""
PAPER_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95, 97, 98, 99, 100),
    (2074, 2541, 3641, 9155, 13555, 14199, 15196, 16067, 16857, 18168, 19917, 22864, 24894, 29124,
     36710, 42784, 50215, 62320, 134773),
)
"""Prompts from 2,048 tokens whose first block is seen once."""
PAPER_ANSWER_TOKENS: Final = Quantiles(
    (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 100),
    (1, 4, 28, 86, 156, 188, 215, 241, 270, 301, 335, 376, 418, 487, 699),
)
"""Answers to them."""
BLOCKS_TWO_TO_FIVE: Final = Quantiles(
    (0, 3, 5, 10, 15, 25, 35, 50, 65, 75, 85, 90, 95, 98, 100),
    (1, 7, 9, 17, 26, 30, 36, 50, 61, 69, 77, 85, 95, 106, 161),
)
"""Blocks shared by all requests of a document, for documents with two to five requests. Here and in the next four
tables the upper quarter is raised by a few percent, so that straight lines keep the mean."""
BLOCKS_SIX: Final = Quantiles(
    (0, 3, 5, 10, 15, 25, 35, 50, 65, 75, 85, 90, 95, 98, 100),
    (5, 7, 7, 10, 11, 25, 33, 34, 38, 45, 63, 71, 93, 107, 110),
)
"""The same for six."""
BLOCKS_SEVEN: Final = Quantiles(
    (0, 3, 5, 10, 15, 25, 35, 50, 65, 75, 85, 90, 95, 98, 100),
    (4, 4, 5, 5, 5, 13, 17, 25, 37, 50, 71, 75, 81, 95, 112),
)
"""The same for seven."""
BLOCKS_EIGHT_NINE: Final = Quantiles(
    (0, 3, 5, 10, 15, 25, 35, 50, 65, 75, 85, 90, 95, 97.4, 97.5, 100),
    (5, 5, 5, 6, 7, 9, 18, 33, 71, 87, 101, 109, 133, 152, 360, 386),
)
"""The same for eight or nine; one of 39 is a book of 190,000 tokens."""
BLOCKS_TEN_AND_MORE: Final = Quantiles(
    (0, 3, 5, 10, 15, 25, 35, 42.5, 50, 65, 75, 85, 90, 95, 98, 100),
    (4, 5, 5, 5, 7, 10, 13, 17, 31, 36, 55, 74, 80, 108, 122, 137),
)
"""The same for ten to twenty-four."""
DOCUMENT_ANSWER_TOKENS: Final = Quantiles(
    (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 97, 98, 99, 100),
    (2, 2, 4, 7, 9, 15, 22, 38, 66, 105, 185, 263, 337, 466, 893),
)
"""Answers about documents."""
LONG_QUESTION_TOKENS: Final = Quantiles(
    (0, 5, 25, 50, 75, 95, 99, 100),
    (10, 30, 110, 300, 640, 1250, 1700, 2200),
)
"""What follows a document with up to five requests. Fitted: with the document's own partial block it gives the
measured tokens behind the shared blocks."""
SHORT_QUESTION_TOKENS: Final = Quantiles(
    (0, 5, 25, 50, 75, 95, 99, 100),
    (5, 10, 25, 55, 120, 420, 1100, 1600),
)
"""The same for six requests and more."""

# -- tool & agent: from what is published about the released file
AGENT_CHAT_ANSWER_TOKENS: Final = Quantiles(
    (0, 2, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100),
    (1, 9, 27, 55, 80, 130, 186, 267, 325, 372, 416, 460, 517, 611, 716, 921, 1181, 1830, 2000),
)
"""The conversation trace's answers, those up to 51 tokens at 774/1867 of their weight: above that, arXiv Fig 5 has
the conversation trace's bars, below it this leaves the known number of chat requests."""
LONG_CALL_TOKENS: Final = Quantiles(
    (0, 42, 82, 86.5, 91, 95.5, 98.2, 99.46, 100),
    (6164, 6184, 7126, 7299, 7542, 7958, 8507, 9230, 11500),
)
"""Prompts of the busier program: 12 blocks of instructions, then mostly a line, sometimes a page or two."""
LONG_CALL_ANSWER_TOKENS: Final = Quantiles(
    (0, 62, 62, 88, 100),
    (3, 3, 20, 30, 56),
)
"""Its answers: mostly three tokens, otherwise a sentence or two (known: 20 to 56, and the median of all is 30)."""
SHORT_CALL_TOKENS: Final = Quantiles(
    (0, 25, 50, 75, 90, 97, 99.5, 100),
    (3000, 3040, 3097, 3194, 3322, 3491, 3742, 4000),
)
"""Prompts of the other program: 5 blocks of instructions and one or two more (known: about 3,000 to 3,500)."""
SHORT_CALL_ANSWER_TOKENS: Final = Quantiles(
    (0, 100),
    (16, 25),
)
"""Its answers (known: 16 to 24)."""
OTHER_CALL_TOKENS: Final = Quantiles(
    (0, 100),
    (1000, 8000),
)
"""Prompts of the 18 requests nothing else is known of: assumed."""
OTHER_CALL_ANSWER_TOKENS: Final = Quantiles(
    (0, 100),
    (20, 400),
)
"""Their answers: assumed."""
