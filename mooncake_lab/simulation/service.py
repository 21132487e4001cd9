"""How long a prefill lasts where it runs: on one node or a group, its prefix in DRAM or partly on SSD."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.perf import CppGroup, LatencyModel, cpp_finish_s


@dataclass(frozen=True, slots=True)
class PrefillService:
    """The clock of a prefill instance."""

    model: LatencyModel
    group: CppGroup | None = None
    """The nodes that compute a prompt in turns; None is one node that computes it whole."""

    def finish_s(
        self, tokens: int, reused_tokens: int, ssd_tokens: int = 0, free_s: Sequence[float] = ()
    ) -> list[float]:
        """In how many seconds each node is done with a prompt that begins now; the last one ends it.

        A single node is done when the prompt is. The first of a group can begin the next prompt when it is done
        with this one, so that the pipeline stays full (arXiv §5.1).

        Args:
            tokens: of the prompt.
            reused_tokens: of its prefix.
            ssd_tokens: those of the reused that have to be read from SSD.
            free_s: in how many seconds each node of a group is done with the prompt before.
        """
        if self.group is None:
            return [self._read_beside(self.model.prefill.seconds(tokens, reused_tokens), ssd_tokens)]
        columns = cpp_finish_s(self.group, tokens, reused_tokens, free_s=free_s)
        done_s = [column[-1] for column in columns]
        waited_s = self._read_beside(done_s[-1], ssd_tokens) - done_s[-1]
        return [each_s + waited_s for each_s in done_s]

    def _read_beside(self, compute_s: float, ssd_tokens: int) -> float:
        """Seconds of a computation beside which a prefix is read from SSD.

        Layer `l` can be computed when it was read, and is computed while the next ones are read: as in arXiv
        §5.2, where this overlap is described for DRAM. All layers are equal, so what is not hidden is one layer of
        the shorter of the two.
        """
        if not ssd_tokens:
            return compute_s
        read_s = self.model.ssd_load_s(ssd_tokens)
        return max(compute_s, read_s) + min(compute_s, read_s) / self.model.shape.layers
