"""Whether a device can be relied on: when it fails it is asked less often, and says why."""

import errno
import logging
from typing import Final, final

_FAILED_CHECKSUM: Final = frozenset({errno.EBADMSG, errno.EILSEQ, errno.ENODATA})
"""What systems answer when a file system or a device compared the bytes with a checksum of its own, in vain."""
_LOG: Final = logging.getLogger("mooncake_lab.store")


@final
class Health:
    """One direction (reading or writing) of one tier. Mutable: it remembers failures.

    After `patience` failures in a row the direction is degraded: only every `retry_every`-th operation is tried,
    until one succeeds. It has no clock; what counts is how often somebody wants something.
    """

    __slots__ = ("_failures", "_patience", "_refused", "_retry_every", "_what", "errors", "reason")

    def __init__(self, what: str, *, patience: int, retry_every: int = 16) -> None:
        self._what = what
        self._patience = patience
        self._retry_every = retry_every
        self._failures = 0  # in a row
        self._refused = 0  # since the last attempt
        self.errors = 0
        """Failures so far."""
        self.reason: str | None = None
        """Why it is degraded; `None` while it is not."""

    def allows(self) -> bool:
        """Whether to try now. Changes its count: ask once per operation."""
        if self.reason is None:
            return True
        self._refused += 1
        if self._refused < self._retry_every:
            return False
        self._refused = 0
        return True

    def failed(self, error: Exception) -> None:
        """Note a failure, and say so when it is one too many."""
        self.errors += 1
        self._failures += 1
        if self._failures >= self._patience and self.reason is None:
            self.reason = f"{type(error).__name__}: {error}"
            _LOG.warning("%s is degraded: %s", self._what, self.reason)

    def worked(self) -> None:
        """Note a success, and say so when it ends a degradation."""
        self._failures = 0
        if self.reason is not None:
            _LOG.warning("%s works again; it was degraded: %s", self._what, self.reason)
            self.reason = None
            self._refused = 0


def failed_checksum(trouble: BaseException | None) -> bool:
    """Whether a device answered that these bytes are not what was written; any other error may be the device's."""
    return isinstance(trouble, OSError) and trouble.errno in _FAILED_CHECKSUM


def may_be_one_sector(trouble: BaseException | None, *, is_shared: bool) -> bool:
    """Whether good bytes may take the place of a block that could not be read: its sector may be bad.

    EIO says as little of a sector as of the device. In a medium that others use too, what they can read stays.
    """
    return failed_checksum(trouble) or (
        isinstance(trouble, OSError) and trouble.errno == errno.EIO and not is_shared
    )
