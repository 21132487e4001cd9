"""Nodes by the names that people use, from files, and from what was measured."""

import csv
import json

import pytest

from mooncake_lab.book.testbeds.nodes import find_node, node_latency, nodes
from mooncake_lab.perf import DecodeLatency, PrefillLatency, check_floor, hardware

OWN = """
devices = 8
bfloat16_flops_per_s = 989e12
float32_flops_per_s = 67e12
device_memory_bytes = 80e9
device_memory_bytes_per_s = 3350e9
host_to_device_bytes_per_s = 256e9
nic_bytes_per_s = 400e9
"""


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "l40s", "a800", "h800"])
def test_the_name_of_a_gpu_is_the_node_with_eight_of_them(name):
    """Its model is that of the node, no stage beats the hardware, and KVCache fits beside the weights."""
    found = find_node(name)
    assert (found.name, found.latency) == (f"{name}-node", node_latency(f"{name}-node"))
    assert found == find_node(f"{name}-node")
    assert found.hardware.devices == 8
    assert found.device_tokens > 0
    check_floor(found.latency, found.hardware)


def test_every_node_has_a_model():
    """All hardware with a network card runs LLaMA3-70B, the faster memory with the faster steps."""
    steps = {name: find_node(name).latency.decode.step_s(8, 80_000) for name in nodes()}
    by_memory = sorted(nodes(), key=lambda name: -hardware(name).memory_bytes_per_s)
    assert [steps[name] for name in by_memory] == sorted(steps.values())


def test_a_file_describes_the_same_node(tmp_path):
    """The numbers of a named node, in a file, are that node; its name is the file's unless it says one."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    found, named = find_node(str(path)), find_node("h800")
    assert found.name == "mine"
    assert (found.latency.prefill, found.latency.decode) == (named.latency.prefill, named.latency.decode)
    assert found.device_tokens == named.device_tokens
    path.write_text('name = "rack 7"' + OWN)
    assert find_node(str(path)).name == "rack 7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices = ", "is no TOML"),
        (OWN.replace("devices", "gpus"), "gpus is not known; the fields are name, devices"),
        (OWN.replace("devices = 8\n", ""), "devices is missing"),
        (OWN.replace("989e12", "-1"), "bfloat16_flops_per_s = -1"),
        (OWN.replace("= 8\n", '= "eight"\n'), "Expected `int`, got `str`"),
        (
            OWN.replace("nic_bytes_per_s = 400e9", ""),
            "a node needs host_to_device_bytes_per_s and nic_bytes_per_s",
        ),
        (OWN + "times = 3", "times is 3; the name of a CSV file"),
        (OWN.replace("80e9", "8e9"), "bytes of weights"),
        (OWN.replace("80e9", "inf"), "device_memory_bytes is infinite"),
        (OWN.replace("80e9", "nan"), "device_memory_bytes = nan"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, says):
    """One sentence names the file, the field and what is allowed."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        find_node(str(path))


def write_times(path, rows):
    columns = ("stage", "tokens", "reused_tokens", "batch", "context_tokens", "seconds")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def test_measured_times_are_fitted(tmp_path):
    """Times that follow a formula give its coefficients; a stage without times is scaled as before."""
    (tmp_path / "mine.toml").write_text(OWN + 'times = "times.csv"')
    prefill = PrefillLatency(constant_s=0.05, per_token_s=1e-4, per_token_squared_s=2e-9)
    decode = DecodeLatency(0.03, 2e-4, 1e-7)
    prompts = [
        {"stage": "prefill", "tokens": n, "reused_tokens": "", "seconds": prefill.seconds(n)}
        for n in (500, 4000, 20_000, 100_000)
    ]
    steps = [
        {"stage": "decode", "batch": b, "context_tokens": 1000 * k, "seconds": decode.step_s(b, 1000 * k)}
        for b, k in ((1, 1), (8, 4), (32, 90), (64, 30))
    ]
    scaled = find_node("h800").latency
    for rows in (prompts, steps, prompts + steps):
        write_times(tmp_path / "times.csv", rows)
        found = find_node(str(tmp_path / "mine.toml")).latency
        assert found.prefill.per_token_s == pytest.approx(
            prefill.per_token_s if rows != steps else scaled.prefill.per_token_s, rel=1e-6
        )
        assert found.decode.constant_s == pytest.approx(
            decode.constant_s if rows != prompts else scaled.decode.constant_s, rel=1e-6
        )
        assert found.transfer == scaled.transfer


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"stage": "train", "seconds": 1}, "times.csv:2: stage is 'train'; allowed are prefill and decode"),
        ({"stage": "prefill", "tokens": 5, "seconds": "fast"}, "times.csv:2: seconds is 'fast'"),
        ({"stage": "prefill", "tokens": "", "seconds": 1}, "times.csv:2: tokens is ''"),
        ({"stage": "decode", "batch": 0, "context_tokens": 5, "seconds": 1}, "batch is '0'"),
        ({"stage": "decode", "batch": 1, "context_tokens": -5, "seconds": 1}, "context_tokens is '-5'"),
        ({"stage": "decode", "batch": 1, "context_tokens": "inf", "seconds": 1}, "context_tokens is 'inf'"),
        (None, "has no times"),
    ],
)
def test_what_is_wrong_in_times_is_named(tmp_path, row, says):
    """A bad line of the CSV is named with its number."""
    (tmp_path / "mine.toml").write_text(OWN + 'times = "times.csv"')
    write_times(tmp_path / "times.csv", [row] if row else [])
    with pytest.raises(ValueError, match=says):
        find_node(str(tmp_path / "mine.toml"))


def test_a_file_that_is_no_csv_is_named(tmp_path):
    """Bytes that are no text, and what the CSV reader refuses, are one sentence with the file's name."""
    (tmp_path / "mine.toml").write_text(OWN + 'times = "times.csv"')
    for content in (b"stage,tokens\n\xff\xfe", b'stage\n"' + b"x" * 200_000):
        (tmp_path / "times.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"times\.csv is no CSV: "):
            find_node(str(tmp_path / "mine.toml"))


def test_a_calibrated_server_is_a_node(tmp_path):
    """What calibrate printed gives its stages and its KVCache; another file is refused."""
    model = node_latency("h100-node")
    stages = {
        "prefill": {"constant_s": 0.01, "per_token_s": 1e-4, "per_token_squared_s": 0.0, "load_s_per_token": 0.0},
        "decode": {
            "constant_s": 0.01,
            "per_request_s": 1e-3,
            "per_context_token_s": 0.0,
            "host_s": 0.0,
            "host_free": 0,
        },
        "hybrid": {name: getattr(model.hybrid, name) for name in model.hybrid.__dataclass_fields__},
        "elsewhere_s": 0.002,
    }
    path = tmp_path / "server.json"
    path.write_text(json.dumps({"model": stages, "settings": {"kv_tokens": 9000}}))
    found = find_node(str(path))
    assert (found.device_tokens, found.hardware) == (9000, None)
    assert (found.latency.decode.per_request_s, found.latency.schedule_s) == (1e-3, 0.002)
    no_time = stages | {"decode": dict.fromkeys(stages["decode"], 0.0)}
    for text in (
        "{}", "[]", "no JSON", "[" * 10**5,
        json.dumps({"model": {}, "settings": {"kv_tokens": "many"}}),
        json.dumps({"model": stages, "settings": {"kv_tokens": 0}}),
        json.dumps({"model": no_time, "settings": {"kv_tokens": 9000}}),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match="is not what calibrate --json printed"):
            find_node(str(path))


def test_an_unknown_name_is_refused():
    """The message lists what there is."""
    with pytest.raises(ValueError, match="no node 'h1'; allowed is hardware with a network card: a800-node, "):
        find_node("h1")
