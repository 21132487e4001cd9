"""How long a prefill lasts where it runs: on one node or a group, its prefix in DRAM or partly on SSD."""

from dataclasses import dataclass

from mooncake_lab.perf import CppGroup, LatencyModel, cpp_prefill_s


@dataclass(frozen=True, slots=True)
class PrefillService:
    """The clock of a prefill instance."""

    model: LatencyModel
    group: CppGroup | None = None
    """The nodes that compute a prompt in turns; None is one node that computes it whole."""

    def seconds(self, tokens: int, reused_tokens: int, ssd_tokens: int = 0) -> float:
        """Seconds of a prefill of which `ssd_tokens` of the reused prefix have to be read from SSD.

        Layer `l` can be computed when it was read, and is computed while the next ones are read: as in arXiv
        §5.2, where this overlap is described for DRAM. All layers are equal, so what is not hidden is one layer of
        the shorter of the two.
        """
        if self.group is None:
            compute_s = self.model.prefill.seconds(tokens, reused_tokens)
        else:
            compute_s = cpp_prefill_s(self.group, tokens, reused_tokens)
        if not ssd_tokens:
            return compute_s
        read_s = self.model.ssd_load_s(ssd_tokens)
        return max(compute_s, read_s) + min(compute_s, read_s) / self.model.shape.layers
