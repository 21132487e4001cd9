"""Clients in real time: asyncio tasks that wait for answers, think, and ask again."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.serving.messages import SamplingParams
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.stream import FailedError, RejectedError, RequestStream
from mooncake_lab.workload.sessions import ClientRules, ClientSession, RequestOutcome, goes_on_from
from mooncake_lab.workload.transforms import prompt_of


@final
class LiveClients:
    """The clients of a live cluster, as `simulation.SimulatedClients` are those of a simulated one. Mutable.

    The prompt of a turn that goes on is the prompt of the turn before it, the tokens that the cluster really
    answered, and new tokens that the keys of the turn decide.

    Args:
        runtime: that serves them, on whose event loop they run.
        sessions: what they send; ids of turns are unique.
        rules: how they behave.
        concurrency: how many sessions are played at once; None begins each at its recorded time.

    Raises:
        ValueError: when the concurrency is below 1, or a turn is too long for the cluster.
    """

    def __init__(
        self,
        runtime: ClusterRuntime,
        sessions: Iterable[ClientSession],
        rules: ClientRules,
        *,
        concurrency: int | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"{concurrency} sessions at once; at least 1 is needed")
        self.sent: list[TracedRequest] = []
        """Each request as it was sent, retries included."""
        self.served: dict[int, RequestOutcome] = {}
        """How each turn ended at last, by the id of the turn."""
        self.prompts: dict[int, npt.NDArray[np.int32]] = {}
        """The prompt of each turn that was sent."""
        self.outputs: dict[int, tuple[int, ...]] = {}
        """Tokens that the client of each turn has received."""
        self.not_sent = 0
        """Turns that were not sent, because a turn that they wait for was not answered."""
        self._runtime = runtime
        self._rules = rules
        self._waiting: Final = deque(sessions)
        self._concurrency = concurrency
        turns = [turn for session in self._waiting for turn in session.turns]
        self._next_id = 1 + max((turn.request.id for turn in turns), default=-1)
        for turn in turns:
            tokens, most = turn.request.input_tokens + turn.output_tokens, runtime.max_model_len()
            if tokens > most:
                raise ValueError(f"turn {turn.request.id} and its answer are {tokens} tokens; {most} fit")

    async def play(self) -> None:
        """Send all sessions; return when the last turn has ended."""
        async with asyncio.TaskGroup() as group:
            if self._concurrency is None:
                for session in self._waiting:
                    group.create_task(self._at_its_time(session))
            else:
                for _ in range(min(self._concurrency, len(self._waiting))):
                    group.create_task(self._one_after_the_other())

    async def _at_its_time(self, session: ClientSession) -> None:
        await asyncio.sleep(max(0.0, session.begins_s - self._runtime.now_s()))
        await self._session(session, session.begins_s)

    async def _one_after_the_other(self) -> None:
        while self._waiting:
            await self._session(self._waiting.popleft(), self._runtime.now_s())

    async def _session(self, session: ClientSession, begins_s: float) -> None:
        """Play a session that begins now."""
        answers, offset_s = dict[int, asyncio.Task[None]](), begins_s - session.begins_s
        turns = {turn.request.id: turn for turn in session.turns}
        async with asyncio.TaskGroup() as group:
            for turn in session.turns:
                answers[turn.request.id] = group.create_task(self._turn(turn, turns, answers, offset_s))

    async def _turn(
        self,
        turn: TracedRequest,
        turns: dict[int, TracedRequest],
        answers: dict[int, asyncio.Task[None]],
        offset_s: float,
    ) -> None:
        """Wait for the answers that the turn needs, think, and send it, again after a refusal for load."""
        request, runtime = turn.request, self._runtime
        for waits in request.wait_for:
            await asyncio.shield(answers[waits])
        if not all(waits in self.served and self.served[waits].is_answered for waits in request.wait_for):
            self.not_sent += 1
            return
        if request.wait_for and request.delay_s is not None:
            wait_s = max(self.served[waits].at_s for waits in request.wait_for) + request.delay_s - runtime.now_s()
        else:
            wait_s = request.arrival_s + offset_s - runtime.now_s()
        await asyncio.sleep(max(0.0, wait_s))
        prompt = self.prompts[request.id] = self._prompt(turn, [turns[waits] for waits in request.wait_for])
        served = await self._send(turn, prompt, request.id)
        for _ in range(self._rules.retries):
            if served.retry_after_s is None:
                break
            await asyncio.sleep(served.retry_after_s)
            turn = replace(turn, request=replace(request, id=self._next_id, retry_of=turn.request.id))
            self._next_id += 1
            served = await self._send(turn, prompt, request.id)
        self.served[request.id] = served

    def _prompt(self, turn: TracedRequest, waited_for: list[TracedRequest]) -> npt.NDArray[np.int32]:
        drawn = prompt_of(turn.request, self._runtime.supervisor.ready.shape.vocabulary)
        before = goes_on_from(turn, waited_for)
        if before is None:
            return drawn
        answer = np.asarray(self.outputs[before.request.id], dtype=np.int32)
        known = np.concatenate([self.prompts[before.request.id], answer])
        return np.concatenate([known, drawn[len(known) :]])

    async def _send(self, turn: TracedRequest, prompt: npt.NDArray[np.int32], name: int) -> RequestOutcome:
        """Send a turn, and receive its answer under the id of the turn; the client leaves without patience."""
        runtime, request = self._runtime, replace(turn.request, arrival_s=self._runtime.now_s())
        self.sent.append(replace(turn, request=request))
        stream: RequestStream | None = None
        try:
            params = SamplingParams(max_new_tokens=turn.output_tokens, end_tokens=())
            stream = runtime.submit(prompt, params, traced=request)
            async with asyncio.timeout(_or_none(self._rules.answer_patience_s)):
                tokens = aiter(stream)
                async with asyncio.timeout(_or_none(self._rules.first_token_patience_s)):
                    self.outputs[name] = (await anext(tokens),)
                self.outputs[name] += tuple([token async for token in tokens])
        except RejectedError as error:
            return self._refused(request, error.stage, error.reason, error.retry_after_s)
        except FailedError as error:
            return self._refused(request, "failed", str(error), None)
        except TimeoutError:
            what = "answer" if stream is not None and stream.tokens else "first token"
            reason = f"the client waited too long for its {what}"
            if stream is not None:
                runtime.cancel(stream, reason)
            return self._refused(request, "client", reason, None)
        except BaseException:
            if stream is not None:
                runtime.cancel(stream, "the run ended")
            raise
        return RequestOutcome(request=request, at_s=runtime.now_s(), output_tokens=len(self.outputs[name]))

    def _refused(self, request: Request, stage: str, reason: str, retry_after_s: float | None) -> RequestOutcome:
        at_s = self._runtime.now_s()
        return RequestOutcome(request=request, at_s=at_s, stage=stage, reason=reason, retry_after_s=retry_after_s)


def _or_none(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds
