"""What `serve` and `replay` share: the cluster that options describe, and which options it has no use for."""

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
    """The cluster that options describe; one prefill and one decode worker where they say nothing.

    Raises:
        typer.BadParameter: when they contradict each other, or one of them would be without effect.
    """
    from mooncake_lab.serving.spec import LiveSpec  # not above: other commands do without the live cluster

    _check_pools(context, coupled, batching)
    _check_admission(coupled, admission)
    if placement != "random" and not model.startswith("random:"):
        refuse_typed(context, ["seed"], f"{model} has its weights, and nothing else here is by chance")
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
    """Let stderr show which workers start, what they load, and when they are ready."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("supervisor", "hall"):
        logging.getLogger(f"mooncake_lab.serving.{name}").setLevel(logging.INFO)


def refuse_typed(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that would be without effect, where somebody typed them: a default is no mistake.

    Args:
        context: of the command.
        names: of parameters, such as `ttft_slo`; those that the command does not have are passed over.
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
    """Refuse what belongs to the other kind of cluster."""
    if coupled is None:
        refuse_typed(context, ["batching"], "it is for --coupled workers; the others have their own")
        return
    refuse_typed(context, ["prefill", "decode"], "--coupled workers do both stages")
    refuse_typed(context, ["transfer"], "--coupled workers move no KVCache")
    store = ["cache_tokens", "ssd_dir", "ssd_tokens"]
    refuse_typed(context, store, "--coupled workers have no store; their engines hold --decode-tokens")
    if batching not in CHUNKED_POLICIES:
        refuse_typed(context, ["chunk"], f"--batching {batching} never cuts a prompt")


def _check_admission(coupled: int | None, admission: str) -> None:
    """Refuse policies that look at what is not there, as `simulate` does."""
    if admission == "priority":
        raise typer.BadParameter("--admission priority is about classes, and live requests have none; give early")
    if coupled is not None and admission not in {"none", "slo", "early"}:
        raise typer.BadParameter(
            f"--admission {admission} is about what lies between two pools; with --coupled give none, slo or early"
        )


def _placement(name: str | None, seed: int) -> PlacementPolicy | None:
    return None if name is None else named_placement(name, seed)
