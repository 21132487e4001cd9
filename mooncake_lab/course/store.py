"""A KVCache store of several nodes, behind a network that loses messages, and on machines that stop.

The network is a schedule: steps of a client, and the fates of single messages. A schedule that fails is shortened
to one that still fails, and can be replayed.
"""

import random
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

BLOCK_BYTES: Final = 600
"""Size of a block."""
NODES: Final = ("n0", "n1", "n2", "n3")
PATIENCE_TICKS: Final = 60
"""How long the client waits for an answer."""
NOTICE_TICKS: Final = 5
"""After so many ticks, all other nodes are told that a machine is lost."""
_MOST_MESSAGES: Final = 200
"""That a node may send at once."""
_MOST_SENT: Final = 50_000
"""Messages of a run."""
_CHECKED: Final = 12
"""Schedules of `check_store`, every second one with a machine that stops."""
_SHORT_TRIED: Final = 60
_MOST_TRIED: Final = 200
"""Schedules that are tried in search of a shorter one."""

Message: TypeAlias = dict[str, Any]
Sent: TypeAlias = Sequence[tuple[str, Any]]


class StoreNode(Protocol):
    """One machine of the store."""

    def on_message(self, sender: str, message: Message, /) -> Sent:
        """What it sends, and to whom, after a message of the client, of the cluster, or of another node."""
        ...

    def on_tick(self, now: int, /) -> Sent:
        """What it sends, and to whom, as time passes."""
        ...


class ClientStep(NamedTuple):
    """One thing that happens: `put`, `get` and `remove` of a key through a node; `stop` of a node; `wait`."""

    what: Literal["put", "get", "remove", "stop", "wait"]
    node: str = ""
    key: str = ""
    ticks: int = 0

    def __str__(self) -> str:
        match self.what:
            case "wait":
                return f"wait {self.ticks}"
            case "stop":
                return f"stop {self.node}"
            case _:
                return f"{self.what} {self.key} via {self.node}"


class Fate(NamedTuple):
    """What becomes of a message: the ticks after which it arrives, once for each; none where it is lost."""

    arrives: tuple[int, ...]


class MessagePlace(NamedTuple):
    """The message of which a fate is: the n-th one from a node to another."""

    sender: str
    receiver: str
    number: int


USUAL: Final = Fate((1,))
Fates: TypeAlias = Callable[[MessagePlace], Fate]


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in a run: the steps, and the messages that do not simply arrive after one tick."""

    steps: tuple[ClientStep, ...]
    fates: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """By message, as in `n0>n1 #2`: the ticks after which it arrives; empty where it is lost."""

    def fate(self, place: MessagePlace) -> Fate:
        """Of a message."""
        return Fate(tuple(self.fates.get(_named(place), USUAL.arrives)))

    def __str__(self) -> str:
        told = (f"{name}{_told_of(Fate(tuple(ticks)))}" for name, ticks in self.fates.items())
        return "; ".join([*map(str, self.steps), *told])


def _named(place: MessagePlace) -> str:
    return f"{place.sender}>{place.receiver} #{place.number}"


def _short(message: Any) -> str:
    """A message with the beginning of its block."""
    if not isinstance(message, dict):
        return reprlib.repr(message)
    return " ".join(
        f"{name}={value:.12}" if isinstance(value, str) else f"{name}={reprlib.repr(value)}"
        for name, value in message.items()
    )


def _told_of(fate: Fate) -> str:
    if not fate.arrives:
        return ", lost"
    return "" if fate == USUAL else f", arrives after {' and '.join(map(str, fate.arrives))} ticks"


def usual(_: MessagePlace) -> Fate:
    """Every message arrives after one tick."""
    return USUAL


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """What a run showed; mutable because it is filled as the run goes on."""

    failure: str = ""
    """The first answer that is wrong, or nothing."""
    steps: int = 0
    """Until then."""
    asked: dict[str, int] = field(default_factory=dict[str, int])
    """Steps of the client by kind; of `get` those whose block is certainly there."""
    answered: dict[str, int] = field(default_factory=dict[str, int])
    """Those that were confirmed, and blocks that were found."""
    moved_bytes: int = 0
    """Of blocks and all else in messages between nodes."""
    fates: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The messages that did not simply arrive after one tick."""
    told: list[str] | None = None
    """What happened, a line for each step and each message, if it is wanted."""

    def tell(self, now: int, line: str) -> None:
        """Note what happened."""
        if self.told is not None:
            self.told.append(f"{now:4} {line}")

    def share(self, what: str) -> float:
        """Of the steps of a kind that were answered as they should; 1 where there are none."""
        asked = self.asked.get(what, 0)
        return self.answered.get(what, 0) / asked if asked else 1.0

    @property
    def moved_blocks(self) -> float:
        """Bytes between nodes, in blocks, per `put` and `get`."""
        return self.moved_bytes / BLOCK_BYTES / max(self.asked.get("put", 0) + self.asked.get("get", 0), 1)


def block_of(key: str) -> str:
    """The only block that a key names."""
    return (f"block of {key}. " * BLOCK_BYTES)[:BLOCK_BYTES]


@dataclass(slots=True)
class _Coming:
    """Messages under way; mutable because they arrive."""

    fates: Fates
    outcome: RunOutcome
    sent: int = 0
    due: dict[int, list[tuple[str, str, bytes]]] = field(default_factory=dict[int, list[tuple[str, str, bytes]]])
    numbers: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def send(self, sender: str, messages: Sent, now: int) -> None:
        """Give messages of a node to the network.

        Raises:
            ValueError: when they are too many, or have no receiver.
        """
        if len(messages) > _MOST_MESSAGES:
            raise ValueError(f"{sender} sends {len(messages)} messages at once; allowed are {_MOST_MESSAGES}")
        for receiver, message in messages:
            self.sent += 1
            if self.sent > _MOST_SENT:
                raise ValueError(f"the nodes sent more than {_MOST_SENT:,} messages")
            packed = msgspec.msgpack.encode(message)  # as between machines: the receiver gets a copy
            if receiver == "client":
                self.due.setdefault(now, []).append((sender, receiver, packed))
                continue
            if receiver not in NODES:
                raise ValueError(
                    f"{sender} sends a message to {receiver!r}; there are {', '.join(NODES)} and client"
                )
            self.outcome.moved_bytes += len(packed) * (sender != receiver)
            number = self.numbers[sender, receiver] = self.numbers.get((sender, receiver), 0) + 1
            place = MessagePlace(sender, receiver, number)
            fate = self.fates(place)
            if fate != USUAL:
                self.outcome.fates[_named(place)] = fate.arrives
            self.outcome.tell(now, f"{_named(place)} {_short(message)}{_told_of(fate)}")
            for ticks in fate.arrives:
                self.due.setdefault(now + ticks, []).append((sender, receiver, packed))


class _Run:
    """A cluster and its client in one run; mutable because time passes."""

    def __init__(self, make: Callable[[str], StoreNode], fates: Fates, told: list[str] | None) -> None:
        self.outcome = RunOutcome(told=told)
        self._nodes = {name: make(name) for name in NODES}
        self._network = _Coming(fates, self.outcome)
        self._now = 0
        self._number = 0
        self._answer: Message | None = None
        self._notices: dict[int, str] = {}
        self._there: dict[str, bool | None] = {}  # whether a block is there, if that is certain

    def step(self, step: ClientStep) -> None:
        """Let it happen; the outcome has the failure if there is one."""
        self.outcome.tell(self._now, str(step))
        if step.what == "wait":
            for _ in range(step.ticks):
                self._tick()
        elif step.node not in self._nodes:
            return  # it is stopped, and no client reaches it
        elif step.what == "stop":
            del self._nodes[step.node]
            self._notices[self._now + NOTICE_TICKS] = step.node
        else:
            self._ask(step)

    def _ask(self, step: ClientStep) -> None:
        """A step of the client, which waits for the answer."""
        self._number += 1
        message: Message = {"kind": step.what, "id": self._number, "key": step.key}
        if step.what == "put":
            message["block"] = block_of(step.key)
        was, self._answer = self._there.get(step.key, False), None
        if step.what != "get":
            self._there[step.key] = None
        self._send(step.node, self._nodes[step.node].on_message("client", message))
        self._deliver()
        for _ in range(PATIENCE_TICKS):
            if self._answer is not None:
                break
            self._tick()
        counts = step.what != "get" or was is True
        self.outcome.asked[step.what] = self.outcome.asked.get(step.what, 0) + counts
        if self._answer is None:
            return
        if step.what == "get":
            block = self._answer.get("block")
            if block is not None and block != block_of(step.key):
                self.outcome.failure = f"get {step.key} via {step.node} was answered with something else"
            elif block is not None and was is False:
                self.outcome.failure = (
                    f"get {step.key} via {step.node} was answered with a block that is not there"
                )
            found = block is not None
        else:
            self._there[step.key], found = step.what == "put", True
        self.outcome.answered[step.what] = self.outcome.answered.get(step.what, 0) + (counts and found)

    def _send(self, name: str, messages: Sent) -> None:
        self._network.send(name, messages, self._now)

    def _tick(self) -> None:
        self._now += 1
        lost = self._notices.pop(self._now, None)
        for name, node in self._nodes.items():
            if lost is not None:
                self._send(name, node.on_message("cluster", {"kind": "lost", "node": lost}))
            self._send(name, node.on_tick(self._now))
        self._deliver()

    def _deliver(self) -> None:
        """All that is due now; what a node sends to the client at once arrives at once."""
        while coming := self._network.due.pop(self._now, None):
            for sender, receiver, packed in coming:
                message = msgspec.msgpack.decode(packed)
                if receiver == "client":
                    self.outcome.tell(self._now, f"{sender}>client {_short(message)}")
                    if isinstance(message, dict) and message.get("id") == self._number:
                        self._answer = message
                elif receiver in self._nodes:
                    self._send(receiver, self._nodes[receiver].on_message(sender, message))


def run_schedule(
    make: Callable[[str], StoreNode],
    steps: Iterable[ClientStep],
    fates: Fates = usual,
    told: list[str] | None = None,
) -> RunOutcome:
    """Let a client use a store of new nodes, until a wrong answer or the end of the steps.

    Args:
        make: makes the node of a name.
        steps: in order.
        fates: of messages between nodes.
        told: gets a line for each step and each message.

    Raises:
        ValueError: when a node sends what cannot be sent.
    """
    run = _Run(make, fates, told)
    for number, step in enumerate(steps, 1):
        run.step(step)
        run.outcome.steps = number
        if run.outcome.failure:
            break
    return run.outcome


@dataclass(slots=True)
class _Shrinking:
    """A failing schedule that gets shorter; mutable because it does."""

    make: Callable[[str], StoreNode]
    steps: list[ClientStep]
    fates: dict[str, tuple[int, ...]]
    failure: str
    tried: int = 0

    def takes(self, steps: list[ClientStep], fates: Mapping[str, tuple[int, ...]]) -> bool:
        """Try a shorter schedule, and keep it if it fails."""
        if self.tried >= _MOST_TRIED:
            return False
        self.tried += 1
        found = run_schedule(self.make, steps, Schedule(steps=(), fates=fates).fate)
        if found.failure:
            self.steps, self.failure = steps[: found.steps], found.failure
            self.fates = {name: ticks for name, ticks in fates.items() if name in found.fates}
        return bool(found.failure)

    def leave_out_steps(self) -> None:
        """Larger parts first (delta debugging)."""
        size = len(self.steps)
        while size := size // 2:
            begin = 0
            while begin + 1 < len(self.steps):
                if not self.takes(self.steps[:begin] + self.steps[begin + size :], self.fates):
                    begin += size

    def leave_out_fates(self) -> None:
        """The same; a message whose fate is left out arrives after one tick."""
        size = len(self.fates) + 1
        while size := size // 2:
            begin = 0
            while begin < len(self.fates):
                names = list(self.fates)
                kept = names[:begin] + names[begin + size :]
                if not self.takes(self.steps, {name: self.fates[name] for name in kept}):
                    begin += size

    def wait_instead(self) -> None:
        """Steps of other keys often do no more than take time."""
        for number, step in enumerate(self.steps[:-1]):
            if step.key and step.key != self.steps[-1].key:
                waits = ClientStep("wait", ticks=12)
                self.takes([*self.steps[:number], waits, *self.steps[number + 1 :]], self.fates)


def shortest(
    make: Callable[[str], StoreNode], steps: Sequence[ClientStep], failed: RunOutcome, draw: random.Random
) -> tuple[Schedule, str]:
    """A schedule from which little can be left out without its failure being gone, and the failure.

    Args:
        make: makes the node of a name.
        steps: of a schedule that fails.
        failed: how.
        draw: of short schedules that are tried first.
    """
    for _ in range(_SHORT_TRIED):
        short = _one_key(draw)
        outcome = run_schedule(make, short, faulty(draw))
        if outcome.failure:
            steps, failed = short, outcome
            break
    found = _Shrinking(make, list(steps[: failed.steps]), dict(failed.fates), failed.failure)
    size = 0
    while size != (size := len(found.steps) + len(found.fates)):
        found.leave_out_steps()
        found.leave_out_fates()
        found.wait_instead()
    return Schedule(steps=tuple(found.steps), fates=found.fates), found.failure


def faulty(draw: random.Random) -> Fates:
    """A network that loses one message in eight, repeats one in four, and delays the copy and one other in eight.

    What becomes of a message depends on its place alone.
    """
    key = draw.getrandbits(64)

    def fate(place: MessagePlace) -> Fate:
        one = random.Random(f"{key} {_named(place)}")  # noqa: S311  # a workload
        match int(8 * one.random()):
            case 0:
                return Fate(())
            case 1 | 2:
                return Fate((1, one.randrange(2, 40)))
            case 3:
                return Fate((one.randrange(2, 12),))
            case _:
                return USUAL

    return fate


def few_keys(draw: random.Random, steps: int = 60, *, stops: int = 0) -> list[ClientStep]:
    """A client that puts, gets and removes the same four keys again and again; so many machines stop half-way.

    Through another machine, it at once removes a key of each that stops.
    """
    kinds: tuple[Literal["put", "get", "remove"], ...] = ("put", "put", "get", "get", "get", "remove")
    found = [ClientStep(draw.choice(kinds), draw.choice(NODES), f"k{draw.randrange(4)}") for _ in range(steps)]
    *stopped, other = draw.sample(NODES, stops + 1)
    found[steps // 2 : steps // 2] = [
        each for node in stopped for each in (ClientStep("stop", node), ClientStep("remove", other, "k0"))
    ]
    return found


def _one_key(draw: random.Random) -> list[ClientStep]:
    """A client that puts, removes and gets one key."""
    put, remove, get = (ClientStep(what, draw.choice(NODES), "k0") for what in ("put", "remove", "get"))
    first, second = (ClientStep("wait", ticks=draw.randrange(30)) for _ in range(2))
    return [put, first, remove, second, get]


def many_keys(draw: random.Random, keys: int, *stopped: str) -> list[ClientStep]:
    """A client that puts many keys, sees machines stop one after the other, and then gets each key once."""
    names = [f"k{number}" for number in draw.sample(range(10_000), keys)]
    steps = [ClientStep("put", NODES[number % len(NODES)], key) for number, key in enumerate(names)]
    for node in stopped:
        steps += [ClientStep("stop", node), ClientStep("wait", ticks=40)]
    living = [node for node in NODES if node not in stopped]
    return [*steps, *(ClientStep("get", draw.choice(living), key) for key in names)]


def puts_and_gets(draw: random.Random, keys: int) -> list[ClientStep]:
    """A client that gets every other block that it has put: most blocks of a KVCache are not used again."""
    steps = many_keys(draw, keys)
    return [*steps[:keys], *steps[keys::2]]


def as_json(schedule: Schedule) -> str:
    """The schedule as text that `replay` takes."""
    return msgspec.json.encode(schedule).decode()


def replay(make: Callable[[str, Sequence[str]], StoreNode], schedule: str) -> str:
    """Run a schedule again; a line for each step and each message, and what went wrong.

    Args:
        make: the class of the nodes.
        schedule: as `check_store` prints it, or one of your own.

    Raises:
        ValueError: when the text is no schedule.
    """
    try:
        read = msgspec.json.decode(schedule, type=Schedule)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the schedule cannot be read: {error}") from error
    told = list[str]()
    outcome = run_schedule(lambda name: make(name, list(NODES)), read.steps, read.fate, told)
    return "\n".join([*told, outcome.failure or "no answer was wrong"])


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What `check_store` found; print it to read it."""

    failures: tuple[tuple[str, Schedule], ...]
    """Wrong answers, each with the shortest schedule that was found for it."""
    found_share: Mapping[str, float]
    """Of the blocks that were there: without failures, after a machine is lost, and after a second one."""
    confirmed_share: float
    """Of puts and removals, on a network that loses messages."""
    moved_blocks: float
    """Between nodes, per put and get."""

    def __str__(self) -> str:
        rows = [
            f"FAILED {failure}, in the schedule: {schedule}\n       replay(MyNode, {as_json(schedule)!r})"
            for failure, schedule in self.failures
        ]
        found = [f"blocks found {when}: {share:.1%}" for when, share in self.found_share.items()]
        return "\n".join(
            [
                *(rows or ["ok     no removed and no other block was ever an answer"]),
                *found,
                f"puts and removals confirmed on a bad network: {self.confirmed_share:.1%}",
                f"blocks moved between nodes per put and get: {self.moved_blocks:.2f}",
            ]
        )


def check_store(make: Callable[[str, Sequence[str]], StoreNode], seed: int = 7) -> StoreReport:
    """Run a store through a few schedules.

    Args:
        make: the class of the nodes, which gets the name of the node and the names of all nodes.
        seed: of the schedules.
    """

    def node(name: str) -> StoreNode:
        return make(name, list(NODES))

    draw = random.Random(seed)  # noqa: S311  # a workload
    failures, confirmed = list[tuple[str, Schedule]](), list[float]()
    for number in range(_CHECKED):
        steps, fates = few_keys(draw, stops=number % 2), faulty(draw) if number else usual
        outcome = run_schedule(node, steps, fates)
        confirmed += [outcome.share("put"), outcome.share("remove")]
        if outcome.failure:
            schedule, failure = shortest(node, steps, outcome, draw)
            failures.append((failure, schedule))
    found = {
        when: run_schedule(node, many_keys(draw, 40, *stopped)).share("get")
        for when, stopped in (
            ("without failures", ()),
            ("after a machine is lost", ("n1",)),
            ("after a second one is lost", ("n1", "n2")),
        )
    }
    moved = run_schedule(node, puts_and_gets(draw, 40)).moved_blocks
    failures.sort(key=lambda each: len(each[1].steps))
    return StoreReport(tuple(failures), MappingProxyType(found), min(confirmed), moved)
