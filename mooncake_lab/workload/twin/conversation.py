"""The conversation twin: people who talk, paste, search, edit, and come back a little later.

The story. Sessions begin at a steady rate. The first prompt is the system prompt (one full block, the same in all
sessions) and the user's text, from one line to a book. After each answer the user goes on or not; the
deeper a talk, the likelier it goes on. The next turn comes a think time later and does one of four things:

- ask: the old prompt, the answer, and a short question are the new prompt;
- paste: the same, with a document or search results appended;
- repeat: the very same prompt once more;
- edit: only a leading part of the old prompt stays (old search results give way to new ones, say).

What a turn does depends on what the turn before did; a search is often followed by another. The recorder
polls every three seconds and gives one timestamp to all requests that arrived since.

A first prompt below two blocks shares nothing but the system prompt with its continuation, so the released
file cannot show that it goes on. The twin lets such sessions end and counts their next turns as new sessions.

The tool & agent twin (`ToolAgentProcess`) has such conversations beside two programs that send the same long
instructions all day.
"""

from dataclasses import dataclass, replace

import numpy as np

from mooncake_lab.workload.twin.drafts import (
    BLOCK_SIZE_TOKENS,
    TABLES,
    Drafts,
    Floats,
    Ints,
    Quantiles,
    hours_until,
    join,
    spread,
    stack,
    stream,
)

ASK, PASTE, REPEAT, EDIT, FIRST = range(5)
"""What a turn does, as rows and columns of the table of habits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationProcess:
    """Every number of the conversation twin.

    Measured means: on the released trace, where a request follows another if it reuses more of it than the system
    prompt. Fitted means: near the measured value, corrected for what an hour cannot show (late turns are cut off).
    """

    hour_s: float = 3600.0
    sessions_per_hour: int = 7500
    """Measured 7,373 in 3,537 s."""
    under_way: int = 120
    """Sessions that ran before the recording began and turn up in its first minutes: the measured excess there."""
    under_way_mean_s: float = 150.0
    """How long until they turn up; measured: the excess has gone after about five minutes."""
    system_blocks: int = 1
    """Measured: all requests share id 0, none two."""
    first_tokens: Quantiles = TABLES["first_prompt_tokens"]
    output_tokens: Quantiles = TABLES["answer_tokens"]
    goes_on: tuple[float, ...] = (0.425, 0.515, 0.615, 0.69, 0.73, 0.78, 0.82, 0.85)
    """Chance of one more turn after turn 1, 2, ...; the last stands for all deeper ones. Fitted; measured 0.40,
    0.44, 0.57, 0.66, 0.69, 0.69, 0.83 over the first forty minutes, with the factors below in them."""
    goes_on_after_paste: float = 0.5
    """Factor on that chance; measured 0.22 against 0.52 after a question, in the second turn."""
    goes_on_after_book: float = 0.5
    """Factor on it after a first prompt of more than `book_tokens`; measured 0.24 against 0.40."""
    book_tokens: int = 50_000
    reading_s_per_token: float = 0.05
    """Measured delay of the quickest next turns per token of the answer, which is read while it is written."""
    think_median_s: float = 138.0
    """Time from the end of an answer to the next prompt: log-normal. Fitted to the time from prompt to prompt,
    measured at quartiles 66, 123 and 264 s, with long pauses cut off by the end of the hour."""
    think_spread_between: float = 0.6
    """Standard deviation of its logarithm between sessions (some people are quick); measured 0.55."""
    think_spread_within: float = 1.12
    """The same from turn to turn within a session. Fitted; measured 0.79 with the long pauses cut off."""
    habits: tuple[tuple[float, float, float, float], ...] = (
        (0.887, 0.088, 0.014, 0.011),  # after ask
        (0.318, 0.196, 0.005, 0.481),  # after paste
        (0.450, 0.050, 0.500, 0.000),  # after repeat
        (0.188, 0.112, 0.008, 0.692),  # after edit
    )
    """Chance that the next turn asks, pastes, repeats, edits: measured transitions."""
    first_lengths: tuple[int, ...] = (2_000, 4_000, 6_000, 10_000, 40_000)
    """Classes of first prompts for `first_habits`, by their upper ends."""
    first_habits: tuple[tuple[float, float, float, float], ...] = (
        (0.889, 0.081, 0.028, 0.002),
        (0.696, 0.260, 0.020, 0.024),
        (0.534, 0.396, 0.012, 0.058),
        (0.526, 0.328, 0.018, 0.128),
        (0.486, 0.175, 0.019, 0.320),
        (0.843, 0.048, 0.000, 0.109),
    )
    """The same for the second turn of a session, by the length of its first prompt: measured."""
    ask_tokens: Quantiles = TABLES["ask_tokens"]
    paste_tokens: Quantiles = TABLES["paste_tokens"]
    edit_keeps: Quantiles = TABLES["edit_keeps"]
    edit_length: Quantiles = TABLES["edit_length"]
    longest_tokens: int = 126_195
    """Measured; the model's window is 128k. A session that would outgrow it ends."""


def conversation(requests: int, seed: int, process: ConversationProcess) -> Drafts:
    """Enough hours of conversation to hold `requests` requests; arrivals are exact, the recorder rounds them."""

    def hour(i: int) -> Drafts:
        return conversation_hour(process, i, stream(seed, "conversation", i))

    return hours_until(requests, hour, process.hour_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turn:
    """The same turn of many sessions, and what the next one needs to know."""

    drafts: Drafts
    first_row: int
    """Where these drafts begin in the hour."""
    pace: Floats
    """Logarithm of how much slower than the median each user is."""
    did: Ints
    """What the turn did: ASK, PASTE, REPEAT, EDIT or FIRST."""


def conversation_hour(process: ConversationProcess, hour: int, rng: np.random.Generator) -> Drafts:
    """All turns of the sessions that begin in one hour, turn by turn."""
    turns = [_first_turn(process, hour, rng)]
    while len(turns[-1].drafts):
        turns.append(_next_turn(process, turns[-1], len(turns), rng))
    return stack([turn.drafts for turn in turns])


def _first_turn(process: ConversationProcess, hour: int, rng: np.random.Generator) -> _Turn:
    """The first prompts of the sessions of an hour, shortest first."""
    n = process.sessions_per_hour
    start_s = (hour + rng.random(n)) * process.hour_s
    if hour == 0:
        late = rng.choice(n, process.under_way, replace=False)
        start_s[late] = rng.exponential(process.under_way_mean_s, process.under_way)
    input_tokens = process.first_tokens.at((np.arange(n) + rng.random(n)) / n)
    drafts = Drafts(
        arrival_s=start_s,
        input_tokens=input_tokens.astype(np.int64),
        output_tokens=process.output_tokens.at(spread(rng, n, 1)[0]).astype(np.int64),
        parent=np.full(n, -1),
        kept_blocks=np.full(n, process.system_blocks),
    )
    return _Turn(
        drafts=drafts, first_row=0, pace=rng.normal(0, process.think_spread_between, n), did=np.full(n, FIRST)
    )


def _next_turn(process: ConversationProcess, last: _Turn, turns: int, rng: np.random.Generator) -> _Turn:
    """The turns that follow `last`, the `turns`-th of their sessions, in the sessions that go on."""
    rising = np.argsort(last.drafts.input_tokens, kind="stable")
    luck, act, size, part, answer = spread(rng, len(rising), 5)
    did = _act(process, last, act, rising)
    kept, new = _prompt(process, last.drafts, did, size, part, rising)
    going = (luck < _goes_on(process, last, turns)[rising]) & (new <= process.longest_tokens)
    at = rising[going]
    pause_s = process.think_median_s * np.exp(last.pace[at] + rng.normal(0, process.think_spread_within, len(at)))
    drafts = Drafts(
        arrival_s=last.drafts.arrival_s[at]
        + process.reading_s_per_token * last.drafts.output_tokens[at]
        + pause_s,
        input_tokens=new[going],
        output_tokens=process.output_tokens.at(answer[going]).astype(np.int64),
        parent=last.first_row + at,
        kept_blocks=kept[going],
    )
    return _Turn(drafts=drafts, first_row=last.first_row + len(last.drafts), pace=last.pace[at], did=did[going])


def _goes_on(process: ConversationProcess, last: _Turn, turns: int) -> Floats:
    """The chance that each session has one more turn."""
    chance = process.goes_on[min(turns, len(process.goes_on)) - 1]
    tokens = last.drafts.input_tokens
    book = (last.did == FIRST) & (tokens > process.book_tokens)
    visible = tokens >= (process.system_blocks + 1) * BLOCK_SIZE_TOKENS
    after_paste = np.where(last.did == PASTE, process.goes_on_after_paste, 1.0)
    after_book = np.where(book, process.goes_on_after_book, 1.0)
    return np.asarray(chance * visible * after_paste * after_book, dtype=np.float64)


def _act(process: ConversationProcess, last: _Turn, u: Floats, rows: Ints) -> Ints:
    """What comes next, given what the last turn did and, in the second turn, how long the first prompt was."""
    habits = np.cumsum([*process.habits, *process.first_habits], axis=1)
    by_length = len(process.habits) + np.searchsorted(process.first_lengths, last.drafts.input_tokens[rows])
    habit = np.where(last.did[rows] == FIRST, by_length, last.did[rows])
    return np.minimum((u[:, None] >= habits[habit]).sum(axis=1), EDIT)


def _prompt(
    process: ConversationProcess, last: Drafts, did: Ints, size: Floats, part: Floats, rows: Ints
) -> tuple[Ints, Ints]:
    """Blocks kept from the last prompt, and tokens of the new one."""
    old = last.input_tokens[rows]
    full = old // BLOCK_SIZE_TOKENS
    edited = np.maximum(np.rint(process.edit_keeps.at(part) * full), np.minimum(full, process.system_blocks + 1))
    kept = np.choose(did, [full, full, -(-old // BLOCK_SIZE_TOKENS), edited]).astype(np.int64)
    so_far = old + last.output_tokens[rows]
    asked, pasted = so_far + process.ask_tokens.at(size), so_far + process.paste_tokens.at(size)
    new = np.choose(did, [asked, pasted, old, old * process.edit_length.at(size)]).astype(np.int64)
    return kept, np.where(did == REPEAT, old, np.maximum(new, kept * BLOCK_SIZE_TOKENS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKind:
    """A program that calls the model, with the same instructions first."""

    calls_per_hour: int
    instruction_blocks: int
    input_tokens: Quantiles
    """The whole prompt, instructions included."""
    output_tokens: Quantiles


_CHAT = replace(
    ConversationProcess(), sessions_per_hour=6800, under_way=109, output_tokens=TABLES["agent_chat_answer_tokens"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgentProcess:
    """Every number of the tool & agent twin. Known means: from published figures and descriptions of the file.

    The story (arXiv §4, FAST'25 Table 2). The conversations are those of the conversation twin, with fewer short
    answers. Beside them two programs call the model: each call begins with the program's instructions, many blocks
    long and always the same, and ends with a little that is new. So a third of all blocks are hits on a few hot
    ones. The released file is not needed to make this twin. The arXiv trace has as many requests and covers the
    same hour, so this is its twin as well.
    """

    chat: ConversationProcess = _CHAT
    """The sessions that make 10,938 chat requests of 23,608, as known."""
    agents: tuple[AgentKind, ...] = (
        AgentKind(
            calls_per_hour=9362,  # known: 9,203 in 3,539 s
            instruction_blocks=12,
            input_tokens=TABLES["long_call_tokens"],
            output_tokens=TABLES["long_call_answer_tokens"],
        ),
        AgentKind(
            calls_per_hour=3509,  # known: 3,449
            instruction_blocks=5,
            input_tokens=TABLES["short_call_tokens"],
            output_tokens=TABLES["short_call_answer_tokens"],
        ),
        AgentKind(
            calls_per_hour=18,  # known: 18 requests that begin with a fourth block; their lengths are assumed
            instruction_blocks=1,
            input_tokens=TABLES["other_call_tokens"],
            output_tokens=TABLES["other_call_answer_tokens"],
        ),
    )
    """Known: hot blocks, calls, lengths as the histograms of arXiv Fig 5 show them."""

    @property
    def prefixes_blocks(self) -> tuple[int, ...]:
        """Lengths of the common prefixes: the chat system prompt, then each program's instructions."""
        return (self.chat.system_blocks, *(agent.instruction_blocks for agent in self.agents))


def toolagent(requests: int, seed: int, process: ToolAgentProcess) -> Drafts:
    """Enough hours of chat and calls to hold `requests` requests; arrivals are exact, the recorder rounds them."""

    def hour(i: int) -> Drafts:
        calls = (_calls(process, k, i, stream(seed, "toolagent", k, i)) for k in range(len(process.agents)))
        return join([conversation_hour(process.chat, i, stream(seed, "toolagent", "chat", i)), *calls])

    return hours_until(requests, hour, process.chat.hour_s)


def _calls(process: ToolAgentProcess, agent: int, hour: int, rng: np.random.Generator) -> Drafts:
    """The calls of one program in one hour, at times that have nothing to do with each other."""
    kind = process.agents[agent]
    n = kind.calls_per_hour
    size, answer = spread(rng, n, 2)[:, rng.permutation(n)]
    return Drafts(
        arrival_s=(hour + rng.random(n)) * process.chat.hour_s,
        input_tokens=kind.input_tokens.at(size).astype(np.int64),
        output_tokens=kind.output_tokens.at(answer).astype(np.int64),
        parent=np.full(n, -2 - agent),
        kept_blocks=np.full(n, kind.instruction_blocks),
    )
