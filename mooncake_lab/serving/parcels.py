"""What workers say to each other while they move KVCache: parcels, each possibly with bytes behind it."""

from typing import Annotated, Final, TypeAlias

import msgspec

from mooncake_lab.cluster import PrefillDone
from mooncake_lab.serving.messages import CancelOrder, Job


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=60):
    """First parcel on a connection; answered by `Taken` or `Refused`."""

    version: int
    name: str
    fingerprint: bytes


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=61):
    """KVCache of a request follows, in any order of pieces."""

    job: Job
    tokens: int


class Where(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a process of this machine, as Transfer Engines name it."""

    segment: Annotated[str, msgspec.Meta(pattern=r"^127\.0\.0\.1:[0-9]{1,5}$")]
    address: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Pushed(msgspec.Struct, frozen=True, array_like=True):
    """A Transfer Engine has written the bytes into the memory that was lent."""

    checksum: int
    start_s: float


class Borrow(msgspec.Struct, frozen=True, tag=69):
    """Lend this connection memory that a Transfer Engine may write; answered by `Granted`."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**30)]


class Granted(msgspec.Struct, frozen=True, tag=70):
    """Here, or nowhere: then the connection carries the bytes."""

    where: Where | None


class Piece(msgspec.Struct, frozen=True, kw_only=True, tag=62):
    """Keys, then values, of some tokens of one layer follow as bytes; or were pushed, which `Taken` answers."""

    job: Job
    layer: int
    start: int
    tokens: int
    pushed: Pushed | None = None


class End(msgspec.Struct, frozen=True, kw_only=True, tag=63):
    """That was all of it; answered by `Taken`."""

    job: Job
    first_token: int
    prefilled: PrefillDone
    """How the prefill was: its worker may go down before it reports that."""


class Ask(msgspec.Struct, frozen=True, tag=64):
    """Send these blocks, as far as you have them; answered by `Give` and their bytes."""

    keys: tuple[bytes, ...]
    into: Where | None = None
    """Where a Transfer Engine may write all of them."""


class Give(msgspec.Struct, frozen=True, tag=65):
    """So many of the leading blocks follow as bytes, layer after layer of each, or were pushed."""

    blocks: int
    pushed: Pushed | None = None


class Probe(msgspec.Struct, frozen=True, tag=66):
    """Bytes follow, to be thrown away and answered by `Taken`: a measurement."""

    pushed: Pushed | None = None
    """Or so many bytes were pushed."""
    pushed_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Taken(msgspec.Struct, frozen=True, tag=67):
    """It is here."""


class Refused(msgspec.Struct, frozen=True, tag=68):
    """It is not taken, and why; the connection ends."""

    reason: str


Parcel: TypeAlias = (
    Hello | Begin | Piece | End | CancelOrder | Ask | Give | Probe | Taken | Refused | Borrow | Granted
)
"""What workers send each other."""

PARCELS: Final[msgspec.msgpack.Decoder[Parcel]] = msgspec.msgpack.Decoder(Parcel)
