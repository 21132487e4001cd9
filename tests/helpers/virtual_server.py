"""Servers in virtual time with known costs: what a calibration has to find again."""

from dataclasses import dataclass, field

from mooncake_lab.calibrate import Reply


@dataclass
class Served:
    """A request on the server. Mutable: its answer grows."""

    lane: int
    inquiry: object
    sent_s: float
    arrives_s: float
    computed: int = 0
    times_s: list = field(default_factory=list)

    @property
    def left(self):
        return len(self.inquiry.tokens) - self.computed


@dataclass
class VirtualServer:
    """A `ServedModel` whose requests wait `elsewhere_s`, then for their iterations. Mutable: it counts requests.

    Where stages are `separate`, one worker computes a prompt of n tokens in `prompt_s + token_s n`, one at a time,
    and another a step of k requests in `step_s + request_s k`. Else one worker computes both in an iteration of
    `prompt_s` for each prompt that begins, `request_s k`, and `step_s` and `token_s` for each token: of `step_s`,
    the part that is `hidden` counts only as far as it is longer than the tokens. Running requests go first, and
    prompts are cut to `most_tokens`.
    """

    prompt_s: float = 4.13e-3
    token_s: float = 1.037e-4
    step_s: float = 5.11e-3
    request_s: float = 2.03e-4
    elsewhere_s: float = 0.0
    separate: bool = False
    hidden: float = 0.0
    most_tokens: int = 2048
    takes_token_ids = True
    asked: int = 0
    breaks_at: int | None = None
    """The user presses Ctrl-C when so many requests were asked."""

    def reused_tokens(self):
        return 0.0

    def reset_prefix_cache(self):
        return True

    def replies(self, lanes, note):
        self.asked += sum(map(len, lanes))
        if self.breaks_at is not None and self.asked > self.breaks_at:
            raise KeyboardInterrupt
        run = (_SeparateRun if self.separate else _CoupledRun)(self, lanes)
        run.serve()
        found = [
            [Reply(one.sent_s, tuple(one.times_s), len(one.inquiry.tokens), 0) for one in lane]
            for lane in run.done
        ]
        for reply in [reply for lane in found for reply in lane]:
            note(reply)
        return found


class _Run:
    def __init__(self, server, lanes):
        self.server, self.lanes = server, [list(lane) for lane in lanes]
        self.done = [[] for _ in lanes]
        self.coming = []
        for lane in range(len(lanes)):
            self.send(lane, 0.0)

    def send(self, lane, now_s):
        """The next request of a lane."""
        if self.lanes[lane]:
            inquiry = self.lanes[lane].pop(0)
            sent_s = max(now_s, inquiry.at_s)
            self.coming.append(Served(lane, inquiry, sent_s, sent_s + self.server.elsewhere_s))
            self.coming.sort(key=lambda one: one.arrives_s)

    def arrived(self, now_s):
        found = [one for one in self.coming if one.arrives_s <= now_s + 1e-12]
        self.coming = self.coming[len(found) :]
        return found

    def token(self, one, now_s):
        """One more token; whether the request goes on."""
        one.times_s.append(now_s)
        if len(one.times_s) < one.inquiry.output_tokens:
            return True
        self.done[one.lane].append(one)
        self.send(one.lane, now_s)
        return False


class _CoupledRun(_Run):
    def serve(self):
        now_s, waiting, running = 0.0, [], []
        while self.coming or waiting or running:
            if not (waiting or running):
                now_s = max(now_s, self.coming[0].arrives_s)
            waiting += self.arrived(now_s)
            room, plan = self.server.most_tokens, []
            for one in running + waiting:
                tokens = min(room, one.left or 1)
                if tokens:
                    plan.append((one, tokens))
                    room -= tokens
            now_s += self.seconds(plan)
            after = []
            for one, tokens in plan:
                one.computed += min(tokens, one.left)
                if one.left or self.token(one, now_s):
                    after.append(one)
            waiting = [one for one in waiting if all(one is not each for each, _ in plan)]
            running = after

    def seconds(self, plan):
        server = self.server
        tokens = sum(count for _, count in plan)
        decodes = sum(not one.left for one, _ in plan)
        begun = sum(one.left > 0 and not one.computed for one, _ in plan)
        hidden_s = server.hidden * server.step_s
        linear = server.step_s - hidden_s + max(hidden_s, server.token_s * tokens)
        return begun * server.prompt_s + linear + server.request_s * decodes


class _SeparateRun(_Run):
    """Two workers; a first token is shown when its request joins the others, between two steps."""

    def serve(self):
        server, now_s = self.server, 0.0
        waiting, joining, running, prompt, step_ends_s = [], [], [], None, None
        while self.coming or waiting or joining or running or prompt:
            waiting += self.arrived(now_s)
            if prompt is None and waiting:
                one = waiting.pop(0)
                prompt = (now_s + server.prompt_s + server.token_s * one.left, one)
            if step_ends_s is None and (joining or running):
                running += [one for one in joining if self.token(one, now_s)]
                joining = []
                if running:
                    step_ends_s = now_s + server.step_s + server.request_s * len(running)
                continue
            due = [prompt and prompt[0], step_ends_s, self.coming[0].arrives_s if self.coming else None]
            now_s = min(at_s for at_s in due if at_s is not None)
            if prompt and prompt[0] <= now_s:
                joining.append(prompt[1])
                prompt = None
            if step_ends_s is not None and step_ends_s <= now_s:
                running, step_ends_s = [one for one in running if self.token(one, now_s)], None
