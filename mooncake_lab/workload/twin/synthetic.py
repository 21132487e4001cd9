"""The synthetic twin: a shuffled pool of chats, papers to summarise, and documents with questions.

The story (FAST'25 Table 2 names the sources: ShareGPT, L-Eval, LooGLE). A pool holds three kinds of sessions:

- chats: a prompt, and now and then another turn whose prompt holds everything said so far;
- papers: one long prompt, one summary, no reuse;
- documents: the same long text again and again, each time with another question behind it; a text with very many
  questions has several readers, each a session.

The pool is played in random order, with order kept inside a session: each time one of the unfinished sessions is
drawn and its next request sent. Sessions of one request are soon used up, so towards the end the many questions
about few documents crowd together; the released file has the same drift. Arrivals are Poisson. A trace longer
than one pool plays a second pool, with new texts, after the first.
"""

from dataclasses import dataclass

import numpy as np

from mooncake_lab.workload.twin.drafts import (
    BLOCK_SIZE_TOKENS,
    TABLES,
    Drafts,
    Floats,
    Ints,
    Quantiles,
    join,
    spread,
    stream,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentKind:
    """Documents that are asked about equally often."""

    documents: int
    """How many a pool holds."""
    questions: Quantiles
    """Requests a document, before rounding down."""
    document_blocks: Quantiles
    """Blocks that all requests of a document share, before rounding."""
    question_tokens: Quantiles
    """What follows the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticProcess:
    """Every number of the synthetic twin. Measured means: on the released trace, a session being a first block."""

    requests_per_s: float = 3.9069
    """Measured; the gaps between arrivals are exponential (coefficient of variation 1.01)."""
    chats: int = 1210
    """Measured 1,301 prompts below 2,048 tokens, later turns included."""
    chat_goes_on: float = 0.07
    """Measured where it shows: 14 later turns after 194 chat prompts that fill a block."""
    chat_tokens: Quantiles = TABLES["chat_tokens"]
    chat_answer_tokens: Quantiles = TABLES["chat_answer_tokens"]
    papers: int = 566
    """Measured: prompts of 2,048 tokens or more whose first block is never seen again."""
    paper_tokens: Quantiles = TABLES["paper_tokens"]
    paper_answer_tokens: Quantiles = TABLES["paper_answer_tokens"]
    documents: tuple[DocumentKind, ...] = (
        DocumentKind(
            documents=220,
            questions=Quantiles((0, 23.6, 52.3, 79.5, 100), (2, 3, 4, 5, 6)),
            document_blocks=TABLES["blocks_two_to_five"],
            question_tokens=TABLES["long_question_tokens"],
        ),
        DocumentKind(
            documents=55,
            questions=Quantiles((0, 100), (6, 7)),
            document_blocks=TABLES["blocks_six"],
            question_tokens=TABLES["short_question_tokens"],
        ),
        DocumentKind(
            documents=32,
            questions=Quantiles((0, 100), (7, 8)),
            document_blocks=TABLES["blocks_seven"],
            question_tokens=TABLES["short_question_tokens"],
        ),
        DocumentKind(
            documents=39,
            questions=Quantiles((0, 64.1, 100), (8, 9, 10)),
            document_blocks=TABLES["blocks_eight_nine"],
            question_tokens=TABLES["short_question_tokens"],
        ),
        DocumentKind(
            documents=35,
            questions=Quantiles(
                (0, 20, 28.6, 42.9, 54.3, 71.4, 85.7, 91.4, 94.3, 100), (10, 11, 12, 13, 14, 15, 17, 21, 24, 25)
            ),
            document_blocks=TABLES["blocks_ten_and_more"],
            question_tokens=TABLES["short_question_tokens"],
        ),
    )
    """Documents by how often they are asked about: measured counts and quantiles."""
    answer_tokens: Quantiles = TABLES["document_answer_tokens"]
    """Answers about documents: measured quantiles."""
    longest_session: int = 12
    """Requests a session has at most; a text with more is read by several at once. Fitted to when in the released
    file the texts with one, two to three, ... ten and more requests have theirs."""
    asks_again: float = 0.11
    """Measured: 190 of 1,745 later requests repeat a prompt word for word."""


def synthetic(requests: int, seed: int, process: SyntheticProcess) -> Drafts:
    """As many pools as it takes to hold `requests` requests, played one after the other."""
    pools: list[Drafts] = []
    end_s = 0.0
    while sum(map(len, pools)) < requests:
        pools.append(_pool(process, end_s, stream(seed, "synthetic", len(pools))))
        end_s = float(pools[-1].arrival_s.max())
    return join(pools)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sessions:
    """Sessions of one kind as rows, turn after turn, session after session."""

    turns: Ints
    """Rows of each session."""
    input_tokens: Ints
    output_tokens: Ints
    kept_blocks: Ints
    """Leading blocks shared with the row before."""


def _pool(process: SyntheticProcess, start_s: float, rng: np.random.Generator) -> Drafts:
    """One pool of sessions, shuffled, with the times at which its requests arrive."""
    kinds = [
        _chats(process, rng),
        _papers(process, rng),
        *(_documents(process, kind, rng) for kind in process.documents),
    ]
    turns = np.concatenate([kind.turns for kind in kinds])
    n = int(turns.sum())
    clock_s = start_s + np.cumsum(rng.exponential(1 / process.requests_per_s, n))
    readers = -(-turns // process.longest_session)
    reader_turns = np.concatenate([_shares(*pair) for pair in zip(turns.tolist(), readers.tolist(), strict=True)])
    played = np.repeat(np.arange(len(turns)), readers)[_shuffle(reader_turns, rng)]
    place = np.argsort(played, kind="stable")  # of each row, in the order of play
    first = np.zeros(n, dtype=bool)
    first[np.cumsum(turns) - turns] = True
    return Drafts(
        arrival_s=clock_s[place],
        input_tokens=np.concatenate([kind.input_tokens for kind in kinds]),
        output_tokens=np.concatenate([kind.output_tokens for kind in kinds]),
        parent=np.where(first, -1, np.arange(n) - 1),
        kept_blocks=np.where(first, 0, np.concatenate([kind.kept_blocks for kind in kinds])),
    )


def _shares(turns: int, readers: int) -> Ints:
    """The requests of each of the readers of one text, as evenly as possible."""
    return (turns + np.arange(readers)) // readers


def _shuffle(turns: Ints, rng: np.random.Generator) -> Ints:
    """The order of play, shape (all turns,): each time the number of a random session that is not finished."""
    left: list[int] = turns.tolist()
    unfinished = list(range(len(left)))
    order: list[int] = []
    for u in rng.random(int(turns.sum())).tolist():
        at = int(u * len(unfinished))
        session = unfinished[at]
        order.append(session)
        left[session] -= 1
        if not left[session]:
            unfinished[at] = unfinished[-1]
            unfinished.pop()
    return np.array(order)


def _chats(process: SyntheticProcess, rng: np.random.Generator) -> _Sessions:
    """Chats: each later prompt is the one before, its answer, and a new question."""
    turns = rng.geometric(1 - process.chat_goes_on, process.chats)
    size, answer = spread(rng, int(turns.sum()), 2)
    said, answers = (
        process.chat_tokens.at(size).astype(np.int64),
        process.chat_answer_tokens.at(answer).astype(np.int64),
    )
    first = np.cumsum(turns) - turns
    so_far = np.cumsum(said + answers)
    before = np.repeat((so_far - said - answers)[first], turns)
    input_tokens = so_far - answers - before
    kept = np.concatenate([[0], input_tokens[:-1] // BLOCK_SIZE_TOKENS])
    return _Sessions(turns=turns, input_tokens=input_tokens, output_tokens=answers, kept_blocks=kept)


def _papers(process: SyntheticProcess, rng: np.random.Generator) -> _Sessions:
    """Papers: one request each."""
    n = process.papers
    return _Sessions(
        turns=np.ones(n, dtype=np.int64),
        input_tokens=process.paper_tokens.at(_ladder(rng, n)).astype(np.int64),
        output_tokens=process.paper_answer_tokens.at(spread(rng, n, 1)[0]).astype(np.int64),
        kept_blocks=np.zeros(n, dtype=np.int64),
    )


def _documents(process: SyntheticProcess, kind: DocumentKind, rng: np.random.Generator) -> _Sessions:
    """Documents of one kind: the text, then a question that is new or was asked just before."""
    turns = kind.questions.at(spread(rng, kind.documents, 1)[0]).astype(np.int64)
    blocks = np.rint(kind.document_blocks.at(_ladder(rng, kind.documents))).astype(np.int64)
    rest = rng.integers(0, BLOCK_SIZE_TOKENS, kind.documents)
    n = int(turns.sum())
    question, answer, again = spread(rng, n, 3)
    asked = np.repeat(blocks * BLOCK_SIZE_TOKENS + rest, turns) + kind.question_tokens.at(question).astype(
        np.int64
    )
    repeats = again < process.asks_again
    repeats[np.cumsum(turns) - turns] = False
    source = np.maximum.accumulate(np.where(repeats, 0, np.arange(n)))
    input_tokens = asked[source]
    return _Sessions(
        turns=turns,
        input_tokens=input_tokens,
        output_tokens=process.answer_tokens.at(answer).astype(np.int64),
        kept_blocks=np.where(repeats, -(-input_tokens // BLOCK_SIZE_TOKENS), np.repeat(blocks, turns)),
    )


def _ladder(rng: np.random.Generator, n: int) -> Floats:
    """One draw in each of n equal steps from 0 to 1, rising."""
    return (np.arange(n) + rng.random(n)) / n
