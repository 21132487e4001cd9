"""Copies of KVCache from a device to the host that overlap with what the device computes."""

from dataclasses import dataclass, replace
from typing import final

import torch

from mooncake_lab.engine.kvcache import KVSpan


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on the host; from a device it is still on its way."""

    tensor: torch.Tensor
    """Contiguous; its bytes may be read after `wait`."""
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return when its bytes are there; any thread may call this."""
        if self.copied is not None:
            self.copied.synchronize()


@final
class HostCopies:
    """Copies out of one device, over a stream of its own, into pinned memory. Mutable: it owns the stream.

    A copy into pageable memory would occupy the stream that computes, and the thread that launches. What is on a
    CPU is not copied.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def start(self, span: torch.Tensor) -> HostCopy:
        """Begin to copy a tensor, once the current stream has computed it; never waits."""
        if span.device.type != "cuda":
            return HostCopy(span.contiguous())
        self._stream = self._stream or torch.cuda.Stream(span.device)
        pinned = torch.empty(span.shape, dtype=span.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(span.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(span, non_blocking=True)
            span.record_stream(self._stream)  # pyright: ignore[reportArgumentType]  # a cuda stream is a stream
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return HostCopy(pinned, copied)

    def of(self, kv: KVSpan) -> KVSpan:
        """A whole span on the host, all of its bytes there."""
        copies = [self.start(layer) for layer in kv.layers]
        for copy in copies:
            copy.wait()
        return replace(kv, layers=tuple(copy.tensor for copy in copies))
