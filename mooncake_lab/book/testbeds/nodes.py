"""The nodes of FAST'25 as latency models, calibrated to what it prints, and other nodes derived from them.

A node is named (`h100` is the node with eight of them), or described by a file: TOML with the fields of
`perf.Hardware` and, if something was measured, the name of a CSV with the times; or what `mooncake-lab calibrate
--json` printed.
"""

import csv
import math
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from mooncake_lab import perf
from mooncake_lab.core import carried_folder

PACKED_TOKENS: Final = 131_072
"""The longest prompt of LLaMA3-70B in the papers: waiting prompts packed up to it are an alternative to
assumption B56."""


@cache
def paper_node_latency() -> perf.LatencyModel:
    """The latency model of the paper's node, as `fit_nodes` recorded it: the clock of the simulated clusters."""
    recorded = (carried_folder("measured") / "paper_node.json").read_bytes()
    return msgspec.json.decode(recorded, type=perf.LatencyModel)


MEMORY_SHARE = 0.9
"""Share of device memory that weights and KVCache may fill, as serving engines leave by default."""


@dataclass(frozen=True, slots=True)
class NodeModel:
    """A node that runs a model."""

    name: str
    latency: perf.LatencyModel
    device_tokens: int
    """KVCache that its GPUs hold."""
    hardware: perf.Hardware | None = None
    """None where it was calibrated: nothing is known of the machine."""


def find_node(node: str, model: str = "llama3-70b") -> NodeModel:
    """A node by name, or by the file that describes it.

    Args:
        node: a name of `nodes`, with or without `-node`; or a path that ends in `.toml` or `.json`.
        model: the name of a shape; what was calibrated served its own.

    Raises:
        ValueError: naming what is wrong, and what is allowed.
        OSError: when the file cannot be read.
    """
    path = Path(node)
    if path.suffix == ".json":
        return _calibrated(path)
    shape = perf.model_shape(model)
    if path.suffix == ".toml":
        machine, times = _own_hardware(path)
    else:
        name = f"{node}-node" if f"{node}-node" in nodes() else node
        return NodeModel(
            name, node_latency(name, model), device_tokens(perf.hardware(name), shape), perf.hardware(name)
        )
    latency = _scaled(paper_node_latency(), machine, shape)
    if times is not None:
        latency = _measured(latency, times)
    perf.check_floor(latency, machine)
    return NodeModel(machine.name, latency, device_tokens(machine, shape), machine)


def nodes() -> list[str]:
    """The hardware that can be a node: it has a network card and a link to its host's memory."""
    return [name for name in perf.HARDWARE if _is_node(perf.hardware(name))]


def _own_hardware(path: Path) -> tuple[perf.Hardware, Path | None]:
    """The hardware in a TOML file, and the CSV of times that it names."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    times = table.pop("times", None)
    if not isinstance(times, str | None):
        raise ValueError(f"{path}: times is {times!r}; the name of a CSV file is needed")  # noqa: TRY004
    table = {"name": path.stem, "source": str(path), **table}
    known = {each.name: each for each in fields(perf.Hardware)}
    unknown = [name for name in table if name not in known]
    missing = [name for name, each in known.items() if each.default is MISSING and name not in table]
    if unknown or missing:
        what = f"{', '.join(unknown)} is not known" if unknown else f"{', '.join(missing)} is missing"
        raise ValueError(f"{path}: {what}; the fields are {', '.join([*known, 'times'])}")
    endless = [name for name, value in table.items() if value == math.inf]
    if endless:
        raise ValueError(f"{path}: {endless[0]} is infinite; a finite number is needed")
    try:
        machine = msgspec.convert(table, perf.Hardware)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not _is_node(machine):
        raise ValueError(f"{path}: a node needs host_to_device_bytes_per_s and nic_bytes_per_s")
    return machine, None if times is None else path.parent / times


def _measured(latency: perf.LatencyModel, path: Path) -> perf.LatencyModel:
    """The latency model with the stages that a CSV has times of fitted to them.

    Its columns: `stage` (prefill or decode), `tokens` and `reused_tokens` of a prompt, `batch` and
    `context_tokens` of a decode step, and `seconds`.
    """
    from mooncake_lab.perf import fit_decode, fit_prefill

    rows = dict[str, list[list[float]]](prefill=[], decode=[])
    columns = {"prefill": ("tokens", "reused_tokens", "seconds"), "decode": ("batch", "context_tokens", "seconds")}
    for line, row in enumerate(_csv_rows(path), start=2):
        stage = row.get("stage") or ""
        if stage not in rows:
            raise ValueError(f"{path}:{line}: stage is {stage!r}; allowed are prefill and decode")
        rows[stage].append([_number(row, name, f"{path}:{line}") for name in columns[stage]])
    if not any(rows.values()):
        raise ValueError(f"{path} has no times; it needs lines of the stages prefill and decode, or of one")
    import numpy as np  # with the fits

    prefill, decode = latency.prefill, latency.decode
    try:
        if rows["prefill"]:
            prefill = fit_prefill(*np.array(rows["prefill"]).T).model
        if rows["decode"]:
            decode = fit_decode(*np.array(rows["decode"]).T).model
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    hybrid = perf.HybridLatency.of(prefill, decode)
    return replace(latency, name=f"fitted to {path.name}", prefill=prefill, decode=decode, hybrid=hybrid)


def _csv_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no CSV: {error}") from error


def _number(row: dict[str, Any], name: str, place: str) -> float:
    text = row.get(name) or ("0" if name == "reused_tokens" else "")
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    least = 0 if name in {"reused_tokens", "context_tokens"} else 1e-12
    if not (math.isfinite(value) and value >= least):
        raise ValueError(
            f"{place}: {name} is {text!r}; a finite number {'from' if not least else 'above'} 0 is needed"
        )
    return value


def _calibrated(path: Path) -> NodeModel:
    """The server that `mooncake-lab calibrate --json` fitted; its KVCache moves in no time."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        parts, settings = cast("dict[str, Any]", found["model"]), cast("dict[str, Any]", found["settings"])
        tokens = msgspec.convert(settings["kv_tokens"], int)
        nothing = perf.LinkLatency(math.inf)
        latency = perf.LatencyModel(
            name=f"fitted to a server, {path.name}",
            shape=perf.model_shape("llama3-70b"),
            prefill=msgspec.convert(parts["prefill"], perf.PrefillLatency),
            decode=msgspec.convert(parts["decode"], perf.DecodeLatency),
            hybrid=msgspec.convert(parts["hybrid"], perf.HybridLatency),
            transfer=nothing,
            dram=nothing,
            schedule_s=msgspec.convert(parts["elsewhere_s"], float),
        )
        if tokens < 1 or not (latency.prefill.seconds(1) > 0 and latency.decode.step_s(1, 0) > 0):
            raise ValueError("a prompt, a step or the KVCache is empty")  # noqa: TRY301
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is not what calibrate --json printed: {what}") from error
    return NodeModel(path.stem, latency, tokens)


@cache
def node_latency(node: str = "a800-node", model: str = "llama3-70b") -> perf.LatencyModel:
    """The latency model of a node running a model: the paper's own, or that one scaled.

    Raises:
        ValueError: when the node is unknown (the message lists all); when the model is unknown or does not fit.
    """
    if node not in nodes():
        raise ValueError(f"no node {node!r}; allowed is hardware with a network card: {', '.join(nodes())}")
    fitted = paper_node_latency()
    machine, shape = perf.hardware(node), perf.model_shape(model)
    device_tokens(machine, shape)
    if (node, model) == ("a800-node", fitted.shape.name):
        return fitted
    scaled = _scaled(fitted, machine, shape)
    perf.check_floor(scaled, machine)
    return scaled


def device_tokens(node: perf.Hardware, shape: perf.ModelShape) -> int:
    """KVCache tokens that fit into a node's device memory beside the weights.

    Raises:
        ValueError: when the weights alone do not fit.
    """
    left = MEMORY_SHARE * node.memory_bytes - shape.weight_bytes
    if left < shape.kv_bytes_per_token:
        raise ValueError(
            f"model {shape.name!r} has {shape.weight_bytes:,} bytes of weights;"
            f" {MEMORY_SHARE:.0%} of the memory of {node.name!r} is {MEMORY_SHARE * node.memory_bytes:,.0f}"
        )
    return int(left // shape.kv_bytes_per_token)


def _is_node(machine: perf.Hardware) -> bool:
    return machine.nic_bytes_per_s is not None and machine.host_to_device_bytes_per_s is not None


def _scaled(fitted: perf.LatencyModel, node: perf.Hardware, shape: perf.ModelShape) -> perf.LatencyModel:
    base, own = perf.hardware("a800-node"), fitted.shape
    compute = base.flops_per_s("bfloat16") / node.flops_per_s("bfloat16")
    memory = base.memory_bytes_per_s / node.memory_bytes_per_s
    host = (base.host_to_device_bytes_per_s or 1.0) / (node.host_to_device_bytes_per_s or 1.0)
    card = (node.nic_bytes_per_s or 1.0) / (base.nic_bytes_per_s or 1.0)
    linear = compute * shape.layers * shape.layer_parameters / (own.layers * own.layer_parameters)
    attention = compute * shape.layers * shape.query_width / (own.layers * own.query_width)
    kvcache = shape.kv_bytes_per_token / own.kv_bytes_per_token
    prefill = perf.PrefillLatency(
        constant_s=fitted.prefill.constant_s,
        per_token_s=fitted.prefill.per_token_s * linear,
        per_token_squared_s=fitted.prefill.per_token_squared_s * attention,
        load_s_per_token=fitted.prefill.load_s_per_token * kvcache * host,
    )
    decode = perf.DecodeLatency(
        fitted.decode.constant_s * memory * shape.weight_bytes / own.weight_bytes,
        fitted.decode.per_request_s * linear,
        fitted.decode.per_context_token_s * memory * kvcache,
    )
    return replace(
        fitted,
        name=f"{node.name} with {shape.name}, scaled from the {fitted.name}",
        shape=shape,
        prefill=prefill,
        decode=decode,
        hybrid=perf.HybridLatency.of(prefill, decode),
        transfer=perf.LinkLatency(fitted.transfer.bytes_per_s * card, fitted.transfer.latency_s),
        dram=perf.LinkLatency(fitted.dram.bytes_per_s / host, fitted.dram.latency_s),
    )
