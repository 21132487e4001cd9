"""What `serve` and `replay` share: the cluster that the options describe, and the options that it refuses."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from mooncake_lab.batching.policies import CHUNKED_POLICIES
from mooncake_lab.cli.generate import BatchingName
from mooncake_lab.cli.simulate_policies import AdmissionName, PlacementName
from mooncake_lab.conductor import ADMISSION_POLICIES, PlacementPolicy, named_placement
from mooncake_lab.core import SLO

if TYPE_CHECKING:
    from mooncake_lab.serving.spec import LiveSpec

TransferName = Literal["tcp", "mooncake"]
__all__ = [
    "AdmissionName",
    "BatchingName",
    "PlacementName",
    "TransferName",
    "live_spec",
    "refuse_typed",
    "show_start",
]


def live_spec(
    context: typer.Context,
    *,
    prefill: int | None,
    decode: int | None,
    coupled: int | None,
    placement: str | None,
    admission: str,
    ttft_slo: float,
    tbt_slo: float,
    seed: int,
    model: str,
    batching: str,
    ssd_dir: Path | None = None,
    **others: Any,
) -> "LiveSpec":
    """The cluster that the options describe; by default it has one prefill and one decode worker.

    Raises:
        typer.BadParameter: when options contradict each other, or one of them would have no effect.
    """
    from mooncake_lab.serving.spec import LiveSpec  # not above: other commands do without the live cluster

    _check_pools(context, coupled, batching)
    _check_admission(coupled, admission)
    if placement != "random" and not model.startswith("random:"):
        refuse_typed(context, ["seed"], f"{model} has its own weights, and nothing else in this run is random")
    try:
        return LiveSpec(
            prefill_nodes=0 if coupled else prefill or 1,
            decode_nodes=0 if coupled else decode or 1,
            coupled_nodes=coupled or 0,
            placement=_placement(placement, seed),
            admission=ADMISSION_POLICIES[admission](),
            slo=SLO(ttft_s=ttft_slo, tbt_s=tbt_slo),
            seed=seed,
            model=model,
            batching=batching,
            ssd_dir=None if ssd_dir is None else str(ssd_dir),
            **others,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def show_start() -> None:
    """Report on stderr which workers start, what they load, and when they are ready."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("supervisor", "runtime"):
        logging.getLogger(f"mooncake_lab.serving.{name}").setLevel(logging.INFO)


def refuse_typed(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were typed but would have no effect; defaults are never refused.

    Args:
        context: of the command.
        names: of parameters, such as `ttft_slo`; those that the command does not have are ignored.
        why: ends the sentence.

    Raises:
        typer.BadParameter: naming the options that were typed.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if typed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise typer.BadParameter(f"leave out {options}: {why}")


def _check_pools(context: typer.Context, coupled: int | None, batching: str) -> None:
    """Refuse options of the other kind of cluster."""
    if coupled is None:
        refuse_typed(
            context,
            ["batching"],
            "it is for --coupled workers; prefill and decode workers have their own batching",
        )
        return
    refuse_typed(context, ["prefill", "decode"], "--coupled workers do both stages")
    refuse_typed(context, ["transfer"], "--coupled workers do not transfer KVCache")
    store = ["cache_tokens", "ssd_dir", "ssd_tokens"]
    refuse_typed(context, store, "--coupled workers have no store; --decode-tokens sets the size of their KVCache")
    if batching not in CHUNKED_POLICIES:
        refuse_typed(context, ["chunk"], f"--batching {batching} never cuts a prompt")


def _check_admission(coupled: int | None, admission: str) -> None:
    """Refuse policies that need what this cluster does not have, as `simulate` does."""
    if admission == "priority":
        raise typer.BadParameter(
            "--admission priority needs classes of requests, and live requests have none; use early"
        )
    if coupled is not None and admission not in {"none", "slo", "early"}:
        raise typer.BadParameter(
            f"--admission {admission} needs separate prefill and decode pools;"
            " with --coupled use none, slo or early"
        )


def _placement(name: str | None, seed: int) -> PlacementPolicy | None:
    return None if name is None else named_placement(name, seed)
