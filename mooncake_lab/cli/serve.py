"""`mooncake-lab serve`: a live cluster behind an OpenAI-compatible HTTP API."""

import contextlib
import functools
import ipaddress
import secrets
from pathlib import Path
from typing import Annotated, Literal, Self, final

import msgspec
import typer

from mooncake_lab.cli.live import (
    AdmissionName,
    BatchingName,
    PlacementName,
    TransferName,
    live_spec,
    refuse_typed,
    show_start,
)
from mooncake_lab.core import Record


def _named(name: str | None) -> str | None:
    if name == "":
        raise typer.BadParameter("the name is empty; give one, or leave the option out")
    return name


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="DIR|random:SHAPE", help="A Hugging Face Llama, or a random one.")],
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in requests and answers; --model by default.", callback=_named),
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill workers; 1 by default.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers; 1 by default.")] = None,
    coupled: Annotated[
        int | None,
        typer.Option(min=1, help="Workers that do both prefill and decode, instead of separate workers."),
    ] = None,
    batching: Annotated[BatchingName, typer.Option(help="Batching policy of coupled workers.")] = "sarathi_serve",
    placement: Annotated[
        PlacementName | None, typer.Option(help="Placement policy; Algorithm 1 by default.")
    ] = None,
    admission: Annotated[AdmissionName, typer.Option(help="Admission policy.")] = "none",
    ttft_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time to first token (s).")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time between tokens (s).")] = 0.1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="float32 on CPU, bfloat16 on GPU.")
    ] = None,
    backend: Annotated[
        Literal["auto", "dense", "cpu", "cuda"], typer.Option(help="Implementation of the tensor operations.")
    ] = "auto",
    cache_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of KVCache in the DRAM of a prefill worker.")
    ] = 65_536,
    ssd_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for KVCache that is evicted from DRAM."),
    ] = None,
    ssd_tokens: Annotated[int, typer.Option(min=0, help="Tokens of KVCache on the SSD of a prefill worker.")] = 0,
    decode_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of KVCache in the engine of a decode or coupled worker.")
    ] = 65_536,
    transfer: Annotated[
        TransferName, typer.Option(help="How KVCache is transferred; mooncake needs the extra of that name.")
    ] = "tcp",
    chunk: Annotated[int, typer.Option(min=1, help="Maximum number of prompt tokens per iteration.")] = 512,
    max_request_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per request.")] = 8192,
    most_under_way: Annotated[
        int, typer.Option(min=1, help="Maximum number of unfinished requests; further ones are refused.")
    ] = 1024,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback by default.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose one.")
    ] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File that contains the bearer token.", exists=True, dir_okay=False)
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require no token from clients.")] = False,
    drain: Annotated[
        float, typer.Option(min=0, max=86_400, help="Time for unfinished requests after a signal (s).")
    ] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights and of random placement.")] = 0,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Append the run log to this file, as JSON lines.")
    ] = None,
) -> None:
    """Serve a model behind OpenAI's completions and chat API; each prefill or decode worker is a process.

    Clients need a bearer token. The command prints a random one unless --token-file gives one. /health needs no
    token, and /metrics needs none from this machine. After SIGTERM or SIGINT unfinished requests may finish. A
    rejected request gets status 429 with Retry-After.

    Example: mooncake-lab serve --model random:lab-tiny --prefill 2 --decode 2 --port 8000
    """
    import asyncio

    try:
        from mooncake_lab.serving.openai_api.server import Address
        from mooncake_lab.serving.openai_api.server import serve as serve_until_told
    except ModuleNotFoundError as error:
        typer.echo(f"mooncake-lab serve needs {error.name}: install mooncake-lab[serve]", err=True)
        raise typer.Exit(1) from error
    from mooncake_lab.serving.launch import WorkerError

    if admission == "none":
        refuse_typed(context, ["ttft_slo", "tbt_slo"], "--admission none uses no limits")
    spec = live_spec(
        context, prefill=prefill, decode=decode, coupled=coupled, placement=placement, admission=admission,
        ttft_slo=ttft_slo, tbt_slo=tbt_slo, seed=seed, model=model, batching=batching, device=device, dtype=dtype,
        backend=backend, cache_tokens=cache_tokens, ssd_dir=ssd_dir, ssd_tokens=ssd_tokens,
        decode_tokens=decode_tokens, transfer=transfer, chunk_tokens=chunk, max_request_tokens=max_request_tokens,
        most_under_way=most_under_way, threads=threads,
    )  # fmt: skip
    show_start()
    token = _token(context, token_file, no_token=no_token)
    address = Address(host=host, port=port, token=token, drain_s=drain, model=served_model_name)

    def opened(url: str) -> None:
        name = model if served_model_name is None else f"{model} as {served_model_name}"
        made = [] if token is None or token_file is not None else [f"bearer token: {token}"]
        first = f"serving {name} at {url}/v1 with {', '.join(spec.roles)}"
        typer.echo("\n".join([first, *_warnings(host, token, transfer), *made]), err=True)

    ending = functools.partial(_tell_ending, drain)
    try:
        with contextlib.ExitStack() as opening:
            records = None if log is None else opening.enter_context(_RunLog(log))
            write = None if records is None else records.write
            asyncio.run(serve_until_told(spec, address, opened=opened, write=write, ending=ending))
        if records is not None and records.is_broken:
            raise typer.Exit(1)  # what was lost is said already
    except asyncio.CancelledError:
        raise typer.Exit(1) from None  # told to stop before it was open
    except (ValueError, OSError, WorkerError) as error:
        typer.echo(f"mooncake-lab serve: {error}", err=True)
        raise typer.Exit(1) from error


def _warnings(host: str, token: str | None, transfer: str) -> list[str]:
    """What an operator should know before clients connect."""
    found: list[str] = []
    if token is None and not _is_loopback(host):
        found.append(f"--no-token at {host}: every client that can reach this address can use the server")
    if transfer == "mooncake":
        found.append("Mooncake's Transfer Engine listens on all interfaces without authentication")
    return found


def _tell_ending(drain_s: float, under_way: int) -> None:
    typer.echo(f"stopping; {under_way} requests under way have {drain_s:g} s to finish", err=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(context: typer.Context, file: Path | None, *, no_token: bool) -> str | None:
    if no_token:
        refuse_typed(context, ["token_file"], "--no-token uses no token")
        return None
    if file is None:
        return secrets.token_urlsafe(24)
    token = file.read_text(encoding="utf-8").strip()
    if not token.isascii() or len(token) < 16 or any(character.isspace() for character in token):
        raise typer.BadParameter(
            f"{file} contains no token: at least 16 ASCII characters without spaces are needed"
        )
    return token


@final
class _RunLog:
    """Appends records to a file. Mutable: after a record that cannot be written, it writes no more.

    The server continues without the log: a full disk must not stop requests.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self.is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append one record, whole or not at all."""
        if self.is_broken:
            return
        line, size = self._encoder.encode(record) + b"\n", None
        try:
            size = self._file.tell() if self._file.seekable() else None  # a pipe has no end to go back to
            written = self._file.write(line)
            reason = None if written == len(line) else f"{written} of {len(line)} bytes of a record were taken"
        except OSError as error:
            reason = str(error)
        if reason is not None:
            self.is_broken = True
            with contextlib.suppress(OSError):
                if size is not None:
                    self._file.truncate(size)
            with contextlib.suppress(OSError):  # stderr may be full for the same reason
                typer.echo(f"the log {self._path} ends here, but requests continue: {reason}", err=True)
