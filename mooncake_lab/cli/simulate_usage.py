"""Combinations of options that `mooncake-lab simulate` refuses, because one of them would have no effect."""

from collections.abc import Iterable

import typer

from mooncake_lab.simulation import Failure


def check_usage(
    prefill: int | None,
    decode: int | None,
    coupled: int | None,
    batching: str | None,
    placement: str | None,
    max_tokens: int | None,
) -> None:
    """Refuse combinations of pools and policies in which an option would have no effect.

    Whether the pools give a policy what it needs is checked where their spec is built.

    Raises:
        typer.BadParameter: with what to give instead.
    """
    if coupled is None and (prefill is None or decode is None):
        raise typer.BadParameter("give --prefill and --decode, or --coupled")
    if coupled is not None and (prefill is not None or decode is not None):
        raise typer.BadParameter("--coupled nodes do both stages; leave out --prefill and --decode")
    if coupled is None and batching is not None:
        raise typer.BadParameter("--batching is for --coupled nodes; prefill and decode nodes have their own")
    if coupled is not None and placement == "kvcache_centric":
        raise typer.BadParameter("--coupled nodes have no store to fetch from; the nearest policy is cache_aware")
    if coupled is None and max_tokens is not None:
        raise typer.BadParameter("--max-tokens is for --coupled nodes; decode nodes reserve nothing")


def check_memory(coupled: int | None, ssd_tokens: int, ssd_gb_per_s: float | None, prefill_group: int) -> None:
    """Refuse an SSD without a speed, a speed without an SSD, and SSDs or groups without prefill nodes.

    Raises:
        typer.BadParameter: with what to give instead.
    """
    if coupled is not None and (ssd_tokens or ssd_gb_per_s or prefill_group > 1):
        raise typer.BadParameter(
            "--ssd-tokens, --ssd-gb-per-s and --prefill-group are for prefill nodes; a --coupled cluster has none"
        )
    if bool(ssd_tokens) != (ssd_gb_per_s is not None):
        raise typer.BadParameter("give --ssd-tokens and --ssd-gb-per-s together, or neither")


def check_policies(
    admission: str, decode_s: float | None, urgent_share: float | None, placement: str | None, seed: int | None
) -> None:
    """Refuse a decode time or classes without the policy that uses them; warn if a seed has no effect.

    Raises:
        typer.BadParameter: with what to give instead.
    """
    if decode_s is not None and admission != "predictive":
        raise typer.BadParameter("--decode-s is for --admission predictive")
    if (urgent_share is not None) != (admission == "priority"):
        raise typer.BadParameter("give --admission priority and --urgent-share together, or neither")
    if seed is not None and placement != "random" and urgent_share is None:
        typer.echo("mooncake-lab simulate: nothing in this run is random, so --seed changes nothing", err=True)


def named_failures(said: Iterable[str]) -> tuple[Failure, ...]:
    """Failures from texts `NAME@SECONDS`; the cluster checks whether the instances exist.

    Raises:
        typer.BadParameter: naming the text that has another form.
    """
    found = list[Failure]()
    for one in said:
        name, _, at_s = one.partition("@")
        try:
            found.append(Failure(name, float(at_s)))
        except ValueError as error:
            raise typer.BadParameter(
                f"--fail {one}: {error if at_s else 'no time'}; give NAME@SECONDS, such as prefill-0@600"
            ) from error
    return tuple(found)


def check_failures(said: list[str] | None) -> list[str] | None:
    """Check the texts as `named_failures` does, before any file is read, and return them.

    Raises:
        typer.BadParameter: naming the text that has another form.
    """
    named_failures(said or ())
    return said
