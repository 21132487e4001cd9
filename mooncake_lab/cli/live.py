"""What `serve` and `replay` share: from options to the cluster they describe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from mooncake_lab.cli.simulate import AdmissionName, PlacementName
from mooncake_lab.conductor import ADMISSION_POLICIES, PlacementPolicy, named_placement
from mooncake_lab.core import SLO

if TYPE_CHECKING:
    from mooncake_lab.serving.spec import LiveSpec

BatchingName = Literal[
    "request_level", "orca", "vllm", "vllm_chunked", "splitfuse", "tensorrt_llm", "sarathi", "sarathi_serve"
]
TransferName = Literal["tcp", "mooncake"]
__all__ = ["AdmissionName", "BatchingName", "PlacementName", "TransferName", "live_spec"]


def live_spec(
    *,
    prefill: int | None,
    decode: int | None,
    coupled: int | None,
    placement: str | None,
    admission: str,
    ttft_slo: float,
    tbt_slo: float,
    seed: int,
    ssd_dir: Path | None = None,
    **others: Any,
) -> "LiveSpec":
    """The cluster that options describe; one prefill and one decode worker where they say nothing.

    Raises:
        typer.BadParameter: when they contradict each other.
    """
    from mooncake_lab.serving.spec import LiveSpec  # not above: other commands do without the live cluster

    if coupled is not None and (prefill is not None or decode is not None):
        raise typer.BadParameter("--coupled workers do both stages; leave out --prefill and --decode")
    try:
        return LiveSpec(
            prefill_nodes=0 if coupled else prefill or 1,
            decode_nodes=0 if coupled else decode or 1,
            coupled_nodes=coupled or 0,
            placement=_placement(placement, seed),
            admission=ADMISSION_POLICIES[admission](),
            slo=SLO(ttft_s=ttft_slo, tbt_s=tbt_slo),
            seed=seed,
            ssd_dir=None if ssd_dir is None else str(ssd_dir),
            **others,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _placement(name: str | None, seed: int) -> PlacementPolicy | None:
    return None if name is None else named_placement(name, seed)
