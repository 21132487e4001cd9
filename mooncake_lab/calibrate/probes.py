"""What is measured to fit a server: prompts alone and again, crowds that decode, prompts among them, a queue."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

from mooncake_lab.calibrate.observations import CalibrationError, Inquiry, Reply, ServedModel, random_tokens
from mooncake_lab.calibrate.settings import TEMPLATE_TOKENS, ServerSettings
from mooncake_lab.metrics import mean

_ANSWER_TOKENS: Final = 24
"""Of a prompt alone: so many steps of a batch of one."""
_LONGEST: Final = 2048
"""Prompt tokens, where the server takes so many."""
_SHORT: Final = 16
_STEPS: Final = 24
"""That a whole crowd decodes together."""
_MOST_ANSWER: Final = 1024
_AMONG: Final = (2, 8)
"""Requests that decode while prompts come."""
_BETWEEN: Final = 8
"""Steps between the end of one of these prompts and the next one."""
_LANES: Final = 3
_QUEUED: Final = 6
"""Prompts of each of these lanes, one behind the other."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt that met an idle server: its tokens, those reused, and when its first token came."""

    tokens: int
    reused_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps of a batch: requests, their cached tokens together, and seconds of a step."""

    batch: int
    context_tokens: float
    step_s: float
    prompt_tokens: int = 0
    """Of each request: which probe it was."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Prompts one behind the other: tokens of each, and seconds from one's end to the next's."""

    tokens: int
    each_s: float


@dataclass(frozen=True, slots=True)
class MixedRow:
    """A prompt that met requests that decode: its tokens, theirs, and the step that computed both."""

    tokens: int
    batch: int
    """Requests that decode."""
    context_tokens: float
    """Their cached tokens together."""
    step_s: float


@dataclass(frozen=True, slots=True)
class AgainRow:
    """A prompt that was sent twice: its tokens, both times until the first token, and tokens found again."""

    tokens: int
    first_s: float
    again_s: float
    cached_tokens: int | None

    @property
    def is_found(self) -> bool:
        """Whether a prefix was found: the server says so, or the second time is below half of the first."""
        return self.again_s < self.first_s / 2 if self.cached_tokens is None else self.cached_tokens > 0


@dataclass(slots=True)
class Rows:
    """All that probes found. Mutable: it grows with each round."""

    prompts: list[PromptRow] = field(default_factory=list[PromptRow])
    steps: list[StepRow] = field(default_factory=list[StepRow])
    mixed: list[MixedRow] = field(default_factory=list[MixedRow])
    queues: list[QueueRow] = field(default_factory=list[QueueRow])
    again: list[AgainRow] = field(default_factory=list[AgainRow])
    spread_tokens: int = 0
    """Tokens that came several in an event."""
    skipped: list[str] = field(default_factory=list[str])
    """Probes that showed nothing, and why."""


Note = Callable[[str, Reply], None]
"""Told each reply, and the phase that it belongs to."""
Phase = Literal["warm-up", "alone", "again", "crowd", "mixed", "queue"]


class Prober:
    """Asks one server. Mutable: no prompt is sent twice but on purpose.

    Args:
        server: what is asked.
        settings: what is known of it.
        salt: makes the prompts differ from those of other calibrations.
        most_lanes: the largest crowd.
        note: told each reply.
    """

    def __init__(
        self, server: ServedModel, settings: ServerSettings, salt: int, most_lanes: int, note: Note
    ) -> None:
        self._server = server
        self._settings = settings
        self._salt = salt
        self._numbers = itertools.count()
        self._note = note
        self._crowds = [2**k for k in range(1, 12) if 2**k <= min(most_lanes, settings.max_num_seqs)]

    def inquiry(self, tokens: int, output_tokens: int, at_s: float = 0.0) -> Inquiry:
        """A request whose prompt no other begins like."""
        return Inquiry(random_tokens(tokens, self._salt, next(self._numbers)), output_tokens, at_s)

    @property
    def lengths(self) -> list[int]:
        """Of prompts that are sent alone."""
        most = min(_LONGEST, self._settings.max_model_len - _ANSWER_TOKENS - TEMPLATE_TOKENS)
        found = [2**k for k in range(4, 12) if 2**k <= most]
        if len(found) < 3:
            needed = 64 + _ANSWER_TOKENS + TEMPLATE_TOKENS
            raise CalibrationError(
                f"max_model_len is {self._settings.max_model_len}; at least {needed} are needed"
            )
        return found

    def warm_up(self) -> None:
        """Let the server touch its memory: the longest prompt, a short one, and a crowd; nothing is kept."""
        for tokens in (self.lengths[-1], _SHORT):
            self._ask("warm-up", [[self.inquiry(tokens, 4)]])
        self._ask("warm-up", [[self.inquiry(_SHORT, 8)] for _ in range(max(self._crowds, default=1))])

    def round(self, rows: Rows) -> None:
        """Every probe once."""
        self._alone(rows)
        self._again(rows)
        self._crowd(rows)
        if not self._settings.is_disaggregated:  # else no step computes both
            self._mixed(rows)
        self._queue(rows)

    def _alone(self, rows: Rows) -> None:
        for tokens in self.lengths:
            ((reply,),) = self._ask("alone", [[self.inquiry(tokens, _ANSWER_TOKENS)]])
            rows.prompts.append(PromptRow(reply.prompt_tokens, reply.cached_tokens or 0, reply.ttft_s))
            rows.spread_tokens += reply.spread_tokens
            rows.steps += _common_steps([reply])
        if not rows.steps:
            raise CalibrationError(
                "the tokens of an answer come all at once, or without text: no step can be timed; a server that"
                " streams tokens is needed, and a model whose tokens have a text"
            )

    def _again(self, rows: Rows) -> None:
        """The longest prompt and a shorter one twice: whether and at what cost a prefix is found."""
        for tokens in self.lengths[-1:-4:-2]:
            inquiry = self.inquiry(tokens, 2)
            ((first, again),) = self._ask("again", [[inquiry, inquiry]])
            rows.again.append(AgainRow(again.prompt_tokens, first.ttft_s, again.ttft_s, again.cached_tokens))
            if again.cached_tokens:
                rows.prompts.append(PromptRow(again.prompt_tokens, again.cached_tokens, again.ttft_s))

    def _crowd(self, rows: Rows) -> None:
        """Crowds of 2, 4, 8 ... short prompts, and of longer ones, that decode together."""
        alone_s = {row.tokens: row.ttft_s for row in rows.prompts if not row.reused_tokens}
        step_s = median(row.step_s for row in rows.steps if row.batch == 1)
        for batch in self._crowds:
            for tokens in (_SHORT, self._long(batch)):
                if tokens is None:
                    continue
                nearest = min((abs(each - tokens), each) for each in alone_s)[1]
                answer = _STEPS + int(batch * alone_s[nearest] / step_s)
                if answer > min(_MOST_ANSWER, self._settings.max_model_len - tokens - TEMPLATE_TOKENS):
                    rows.skipped.append(f"a crowd of {batch} prompts of {tokens} tokens never decodes together")
                    continue
                found = self._ask("crowd", [[self.inquiry(tokens, answer)] for _ in range(batch)])
                steps = _common_steps([reply for (reply,) in found])
                if not steps:
                    rows.skipped.append(f"a crowd of {batch} prompts of {tokens} tokens did not decode together")
                rows.steps += steps

    def _mixed(self, rows: Rows) -> None:
        """Prompts that come while others decode: by how much they delay the tokens of these."""
        alone_s = {row.tokens: row.ttft_s for row in rows.prompts if not row.reused_tokens}
        step_s = median(row.step_s for row in rows.steps if row.batch == 1)
        room = min(_MOST_ANSWER, self._settings.max_model_len - _SHORT - TEMPLATE_TOKENS)
        for batch in _AMONG:
            if batch > min(max(self._crowds, default=0), self._settings.max_num_seqs - 1):
                continue
            prompts, at_s = list[Inquiry](), batch * min(alone_s.values()) + _BETWEEN * step_s
            for tokens in self.lengths:
                nearest = min((abs(each - tokens), each) for each in alone_s)[1]
                end_s = at_s + alone_s[nearest] + _BETWEEN * step_s
                if tokens + batch > self._settings.longest_piece or end_s > room * step_s:
                    break
                prompts.append(self.inquiry(tokens, 1, at_s))
                at_s = end_s
            answer = min(room, int(at_s / step_s) + _BETWEEN)
            lanes = [prompts, *([self.inquiry(_SHORT, answer)] for _ in range(batch))]
            came, *decoding = self._ask("mixed", lanes)
            rows.mixed += _delays(came, [reply for (reply,) in decoding])
        if not rows.mixed:
            rows.skipped.append("no prompt came while others decoded")

    def _long(self, batch: int) -> int | None:
        """The longest of the lengths up to 512 of which the KVCache of a crowd has room."""
        room = self._settings.kv_tokens // (2 * batch)
        return next((each for each in reversed(self.lengths) if _SHORT < each <= min(512, room)), None)

    def _queue(self, rows: Rows) -> None:
        """Lanes of prompts without answers, a third of a prompt apart: how long each keeps the next one waiting.

        They are as long as an iteration may be, so that none shares an iteration with another.
        """
        alone = [row for row in rows.prompts if not row.reused_tokens]
        fits = [row for row in alone if row.tokens <= self._settings.longest_piece]
        if not fits:
            rows.skipped.append("no prompt fits into one iteration")
            return
        longest = max(fits, key=lambda row: row.tokens)
        lanes = [
            [self.inquiry(longest.tokens, 1, at_s=lane * longest.ttft_s / _LANES) for _ in range(_QUEUED)]
            for lane in range(_LANES)
        ]
        found = self._ask("queue", lanes)
        ends_s = sorted(reply.times_s[0] for lane in found for reply in lane)[_LANES:-_LANES]
        each_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        tokens = round(mean([reply.prompt_tokens for lane in found for reply in lane]))
        rows.queues.append(QueueRow(tokens, each_s))

    def _ask(self, phase: Phase, lanes: Sequence[Sequence[Inquiry]]) -> list[list[Reply]]:
        """Replies that are all complete.

        Raises:
            CalibrationError: when one is not.
        """
        found = self._server.replies(lanes, lambda reply: self._note(phase, reply))
        for reply in itertools.chain.from_iterable(found):
            if reply.failure is not None:
                asked = sum(map(len, lanes))
                raise CalibrationError(f"the server refuses one of {asked} requests ({phase}): {reply.failure}")
        return found


def _common_steps(replies: Sequence[Reply]) -> list[StepRow]:
    """The step of a crowd while all of it decodes: the mean, so that steps add up; none in too short a time."""
    if min(len(reply.times_s) for reply in replies) < 2:
        return []
    begin_s = max(reply.times_s[1] for reply in replies)  # the first token may come in the midst of a step
    end_s = min(reply.times_s[-1] for reply in replies)
    if not end_s > begin_s:
        return []
    gaps, context = list[float](), 0.0
    for reply in replies:
        inside = [k for k, at_s in enumerate(reply.times_s) if begin_s <= at_s <= end_s]
        if len(inside) < 3:
            return []
        first, last = inside[0], inside[-1]
        gaps.append((reply.times_s[last] - reply.times_s[first]) / (last - first))
        context += reply.prompt_tokens + (first + last + 1) / 2 - 1
    return [StepRow(len(replies), context, mean(gaps), replies[0].prompt_tokens)]


def _delays(prompts: Sequence[Reply], decoding: Sequence[Reply]) -> Iterator[MixedRow]:
    """The step of each prompt that came while all others decoded: their usual one, and by how much they were late.

    A server that computes a prompt in several steps, or in one of its own, delays the others as much.
    """
    for prompt in prompts:
        late, usual, context_tokens = list[float](), list[float](), 0.0
        for reply in decoding:
            times_s = reply.times_s
            first, end = bisect_right(times_s, prompt.sent_s) - 1, bisect_right(times_s, prompt.times_s[0]) + 1
            if first < 1 or end >= len(times_s):
                break
            gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
            usual.append(median(gaps_s))
            late.append(times_s[end] - times_s[first] - (end - first) * usual[-1])
            context_tokens += reply.prompt_tokens + first + 1
        else:
            yield MixedRow(prompt.prompt_tokens, len(decoding), context_tokens, median(usual) + mean(late))
