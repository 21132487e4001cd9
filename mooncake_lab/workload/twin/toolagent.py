"""The tool & agent twin: conversations, and two programs that send the same long instructions all day.

The story (arXiv §4, FAST'25 Table 2). The conversations are those of the conversation twin, with fewer short
answers. Beside them two programs call the model: each call begins with the program's instructions, many blocks
long and always the same, and ends with a little that is new. So a third of all blocks are hits on a few hot ones.

The released file is not needed to make this twin; what is known of it is said beside each number. The arXiv trace
has as many requests and covers the same hour, so this is its twin as well.
"""

from dataclasses import dataclass, replace

import numpy as np

from mooncake_lab.workload.twin import tables
from mooncake_lab.workload.twin.conversation import ConversationProcess, conversation_hour
from mooncake_lab.workload.twin.drafts import Drafts, hours_until, join
from mooncake_lab.workload.twin.draws import Quantiles, spread, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKind:
    """A program that calls the model, with the same instructions first."""

    calls_per_hour: int
    instruction_blocks: int
    input_tokens: Quantiles
    """The whole prompt, instructions included."""
    output_tokens: Quantiles


_CHAT = replace(
    ConversationProcess(), sessions_per_hour=6800, under_way=109, output_tokens=tables.AGENT_CHAT_ANSWER_TOKENS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgentProcess:
    """Every number of the tool & agent twin. Known means: from published figures and descriptions of the file."""

    chat: ConversationProcess = _CHAT
    """The sessions that make 10,938 chat requests of 23,608, as known."""
    agents: tuple[AgentKind, ...] = (
        AgentKind(
            calls_per_hour=9362,  # known: 9,203 in 3,539 s
            instruction_blocks=12,
            input_tokens=tables.LONG_CALL_TOKENS,
            output_tokens=tables.LONG_CALL_ANSWER_TOKENS,
        ),
        AgentKind(
            calls_per_hour=3509,  # known: 3,449
            instruction_blocks=5,
            input_tokens=tables.SHORT_CALL_TOKENS,
            output_tokens=tables.SHORT_CALL_ANSWER_TOKENS,
        ),
        AgentKind(
            calls_per_hour=18,  # known: 18 requests that begin with a fourth block; their lengths are assumed
            instruction_blocks=1,
            input_tokens=tables.OTHER_CALL_TOKENS,
            output_tokens=tables.OTHER_CALL_ANSWER_TOKENS,
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
