"""Stands for CUDA's streams and events, with bytes: a copy happens only when something waits for it."""

import threading
from types import SimpleNamespace

import torch

CUDA = torch.device("cuda", 0)


class Stream:
    """What was asked of it and is not done yet. `waits` are the streams that it waits for."""

    def __init__(self, _device=None):
        self.device = CUDA
        self.asked = []
        self.waits = []
        self._turn = threading.RLock()

    def wait_stream(self, other):
        self.waits.append(other)

    def wait_event(self, event):
        event.synchronize()

    def synchronize(self):
        self.do(lambda: bool(self.asked))

    def do(self, more):
        """Do what was asked, in order, while there is more."""
        with self._turn, torch.inference_mode():
            while more():
                self.asked.pop(0)()


class Event:
    """A place in a stream; what comes before it is done once someone waits for it."""

    def record(self, stream):
        self.stream, self.mark = stream, lambda: None
        stream.asked.append(self.mark)

    def synchronize(self):
        self.stream.do(lambda: self.mark in self.stream.asked)


class OnDevice:
    """A tensor of a device, as far as copies out of it go."""

    def __init__(self, data):
        self.data, self.device, self.shape, self.dtype, self.nbytes = (
            data,
            CUDA,
            data.shape,
            data.dtype,
            data.nbytes,
        )
        self.used_by = []

    def record_stream(self, stream):
        self.used_by.append(stream)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is torch.Tensor.copy_, func
        assert kwargs == {"non_blocking": True}
        into, source = args
        streams.current.asked.append(lambda: into.copy_(source.data))
        return into


class Streams:
    """The streams of a process. `pinned` are the tensors that were allocated in pinned memory."""

    def __init__(self):
        self.default = Stream()
        self.pinned = []
        self._own = threading.local()

    @property
    def current(self):
        """Of this thread."""
        return getattr(self._own, "current", self.default)

    @current.setter
    def current(self, stream):
        self._own.current = stream

    def install(self, monkeypatch):
        """Put these in the place of CUDA's."""
        empty, to = torch.empty, torch.Tensor.to

        def allocate(*shape, pin_memory=False, **options):
            tensor = empty(*shape, **options)
            if pin_memory:
                self.pinned.append(tensor)
            return tensor

        def bring(tensor, place, *args, non_blocking=False, **options):
            if place != CUDA:
                return to(tensor, place, *args, **options)
            assert non_blocking, "the host would wait"
            assert any(_shares(tensor, each) for each in self.pinned), "memory that is not pinned"
            there = torch.full_like(tensor, -1)
            self.current.asked.append(lambda: there.copy_(tensor))
            return there

        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(torch.Tensor, "to", bring)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self._use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)

    def _use(self, stream):
        return _Using(self, stream)


class _Using:
    """The streams' current one is another one for a while."""

    def __init__(self, streams, stream):
        self.streams, self.stream = streams, stream

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self.stream or self.streams.current

    def __exit__(self, *_):
        self.streams.current = self.before


def _shares(tensor, other):
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


streams = Streams()


def fake_streams(monkeypatch):
    """Install new ones; they, to be looked at."""
    global streams  # noqa: PLW0603  # what tensors on the device copy with
    streams = Streams()
    streams.install(monkeypatch)
    return streams


def fake_cache(layers, tokens, heads, width, stream_of):
    """A `KVCache` on the device of one request: `layers[i]` is what was written once its stream came that far."""
    held = {}

    def write(layer, table, start, span):
        assert (table, start) == ("table", 0)
        stream_of().asked.append(lambda: held.__setitem__(layer, span.clone()))

    data = SimpleNamespace(device=CUDA, shape=(layers, 2, tokens, heads, width))
    return SimpleNamespace(data=data, table=lambda _: "table", write=write), held
