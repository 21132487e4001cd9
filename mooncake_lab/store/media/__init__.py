"""Where KVCache bytes really live: DRAM, SSD, a remote node; one contract for all."""

from mooncake_lab.store.media.dram import DramMedium, SharedArena
from mooncake_lab.store.media.medium import (
    AlreadyHeldError,
    Bandwidth,
    Buffer,
    DamagedBlockError,
    DoubtfulBlockError,
    FolderInUseError,
    Medium,
    MediumError,
    MediumFullError,
    NotHeldError,
    Reservation,
    check_block,
)
from mooncake_lab.store.media.mooncake import MooncakeMedium
from mooncake_lab.store.media.mooncake_master import MooncakeClient, MooncakeMaster
from mooncake_lab.store.media.ssd import SsdMedium
from mooncake_lab.store.media.tcp import TcpMedium
from mooncake_lab.store.media.tcp_server import BlockServer
from mooncake_lab.store.media.verify import RoomReport, verify_folder
from mooncake_lab.store.media.wire import PeerRefusedError, ProtocolError

__all__ = [
    "AlreadyHeldError",
    "Bandwidth",
    "BlockServer",
    "Buffer",
    "DamagedBlockError",
    "DoubtfulBlockError",
    "DramMedium",
    "FolderInUseError",
    "Medium",
    "MediumError",
    "MediumFullError",
    "MooncakeClient",
    "MooncakeMaster",
    "MooncakeMedium",
    "NotHeldError",
    "PeerRefusedError",
    "ProtocolError",
    "Reservation",
    "RoomReport",
    "SharedArena",
    "SsdMedium",
    "TcpMedium",
    "check_block",
    "verify_folder",
]
