"""`mooncake-v0 launch`: check, then run the documented commands of one instance, or of a pair with its proxy."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import click

from mooncake_v0.digits import number
from mooncake_v0.errors import ERROR, WARNING, CouldNotCheckError

if TYPE_CHECKING:
    from mooncake_v0.cli.launch_commands import Command, Instance
    from mooncake_v0.config.model import MooncakeConfig
    from mooncake_v0.config.render import FileReport

HELP = """Check the configuration and this host, then start vLLM.

WHAT is prefill, decode, or pair: both and the proxy, on this host. Flags
after -- go to vLLM as they are. It waits until everything serves, passes
Ctrl-C and SIGTERM on, and tells systemd when it is ready (Type=notify).
Exit code: 0 stopped as asked, 1 findings, 2 a process has not started.

\b
Examples:
  mooncake-v0 launch prefill mooncake.json --model Qwen/Qwen2.5-7B-Instruct
  mooncake-v0 launch decode mooncake.json --model ./model --tp 4 \\
      -- --max-model-len 10000 --gpu-memory-utilization 0.8
  mooncake-v0 launch pair mooncake.json --model ./model --serve-metadata
  mooncake-v0 launch prefill mooncake.json --model ./model --print
  mooncake-v0 launch prefill mooncake.json --model ./model \\
      --kv-buffer-size auto --prompt-tokens 8000 --concurrency 16
"""
DEFAULT_BUFFER = "2e9"
CHECK_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Settings:
    """The arguments of one call."""

    what: str
    file: Path
    model: str
    vllm_args: tuple[str, ...]
    ports: tuple[int, int]
    ranks: int
    gpus: tuple[str | None, str | None]
    proxy: tuple[str, int]
    serve_metadata: bool
    timeout_s: float
    log: Path | None
    pid: Path | None


@click.command(help=HELP)
@click.argument("what", type=click.Choice(["prefill", "decode", "pair"]), metavar="WHAT")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM FLAGS]")
@click.option("--model", required=True, metavar="NAME|DIR", help="The model, as vLLM takes it.")
@click.option("--print", "print_only", is_flag=True, help="Check the file, print the commands, start nothing.")
@click.option("--no-check", is_flag=True, help="Start in spite of findings; they are shown all the same.")
@click.option("--prefill-port", type=click.IntRange(1, 65535), default=8100, show_default=True, metavar="P")
@click.option("--decode-port", type=click.IntRange(1, 65535), default=8200, show_default=True, metavar="P")
@click.option(
    "--tp", "ranks", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N", help="Tensor parallel size."
)
@click.option(
    "--kv-buffer-size",
    default=DEFAULT_BUFFER,
    show_default=True,
    metavar="SIZE|auto",
    help="Bytes per rank, such as 2e9 or 4GiB; auto computes it as `size` does.",
)
@click.option("--prompt-tokens", type=click.IntRange(1), metavar="N", help="For auto: the longest prompt.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=8, show_default=True, metavar="M", help="For auto: in flight."
)
@click.option("--prefill-gpus", metavar="LIST", help="CUDA_VISIBLE_DEVICES of prefill.")
@click.option("--decode-gpus", metavar="LIST", help="CUDA_VISIBLE_DEVICES of decode.")
@click.option("--proxy-host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="pair: proxy's address.")
@click.option("--proxy-port", type=click.IntRange(1, 65535), default=8000, show_default=True, metavar="P")
@click.option("--serve-metadata", is_flag=True, help="pair: also run the http metadata server that FILE names.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(1), default=1800, show_default=True, metavar="S", help="To serve."
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Append output to this file; for pair to a file for each process in this folder.",
)
@click.option("--pid-file", type=click.Path(path_type=Path), metavar="PATH", help="Keep the pid there while running.")
def launch(
    what: str,
    file: Path,
    vllm_args: tuple[str, ...],
    model: str,
    print_only: bool,
    no_check: bool,
    prefill_port: int,
    decode_port: int,
    ranks: int,
    kv_buffer_size: str,
    prompt_tokens: int | None,
    concurrency: int,
    prefill_gpus: str | None,
    decode_gpus: str | None,
    proxy_host: str,
    proxy_port: int,
    serve_metadata: bool,
    timeout_s: float,
    log: Path | None,
    pid_file: Path | None,
) -> int:
    from mooncake_v0.cli.launch_checks import check

    settings = Settings(
        what,
        file,
        model,
        vllm_args,
        (prefill_port, decode_port),
        ranks,
        (prefill_gpus, decode_gpus),
        (proxy_host, proxy_port),
        serve_metadata,
        timeout_s,
        log,
        pid_file,
    )
    _refuse_mistakes(settings)
    buffer_bytes = _buffer_bytes(settings, kv_buffer_size, prompt_tokens, concurrency)
    instances = _instances(settings, buffer_bytes)
    config, reports = check(
        file, instances, host=not print_only, timeout_s=CHECK_TIMEOUT_S, serve_metadata=serve_metadata
    )
    _show_findings(reports)
    if config is None or not (no_check or all(report.valid for report in reports)):
        click.echo("nothing was started; `mooncake-v0 explain RULE` tells more", err=True)
        return 1
    stages = _stages(settings, instances, config)
    if print_only:
        for command in (command for stage in stages for command in stage):
            click.echo(command.as_shell())
        return 0
    _require_vllm()
    return _run(settings, stages)


def _refuse_mistakes(settings: Settings) -> None:
    from mooncake_v0.cli.launch_commands import own_flag_in

    own = own_flag_in(settings.vllm_args)
    if own is not None:
        raise click.UsageError(f"{own} after -- is set by launch itself; see `mooncake-v0 launch --help`")
    if settings.what != "pair" and settings.serve_metadata:
        raise click.UsageError("--serve-metadata is for pair; elsewhere run `mooncake-v0 metadata serve`")


def _buffer_bytes(settings: Settings, text: str, prompt_tokens: int | None, concurrency: int) -> int:
    from mooncake_v0.cli.launch_commands import flag_value
    from mooncake_v0.config.kv_transfer import parse_size_bytes

    if text != "auto":
        size = parse_size_bytes(text)
        if not size or size < 0:
            raise click.UsageError(f"--kv-buffer-size {text!r} is not a size; write 2e9, 4GiB or auto")
        return size
    from mooncake_v0.config.model_size import read_model_size
    from mooncake_v0.config.size_advice import advise

    kv = read_model_size(settings.model, dtype=flag_value(settings.vllm_args, "--dtype"))
    longest = number(flag_value(settings.vllm_args, "--max-model-len"))
    tokens = prompt_tokens or (kv.max_position_tokens if longest is None else longest)
    if not tokens:
        raise click.UsageError(
            "--kv-buffer-size auto needs --prompt-tokens: the model does not say how long prompts are"
        )
    return advise(
        kv,
        prompt_tokens=tokens,
        concurrency=concurrency,
        tensor_parallel_size=settings.ranks,
        gpu_memory_bytes=None,
        gpu_memory_utilization=0.9,
        weights_bytes=None,
    ).kv_buffer_size


def _instances(settings: Settings, buffer_bytes: int) -> list[Instance]:
    from mooncake_v0.cli.launch_commands import Instance
    from mooncake_v0.config.model import ROLES

    both = [
        Instance(role, settings.file, settings.model, port, settings.ranks, buffer_bytes, settings.vllm_args, gpus)
        for role, port, gpus in zip(ROLES, settings.ports, settings.gpus)
    ]
    return [instance for instance in both if settings.what in ("pair", instance.role)]


def _stages(settings: Settings, instances: Sequence[Instance], config: MooncakeConfig) -> list[list[Command]]:
    """What is started together; each stage waits for the one before."""
    from urllib.parse import urlsplit

    from mooncake_v0.cli.launch_commands import metadata_command, proxy_command

    servers = [instance.command() for instance in instances]
    if settings.what != "pair":
        return [servers]
    stages = [servers, [proxy_command(*settings.proxy, *instances)]]
    if settings.serve_metadata:
        url = urlsplit(config.metadata_server)
        if url.scheme != "http" or url.path.rstrip("/") != "/metadata":
            raise click.UsageError(f"--serve-metadata needs http://HOST:PORT/metadata in FILE, not {url.scheme}://")
        stages.insert(0, [metadata_command(url.hostname or "127.0.0.1", url.port or 80)])
    return stages


def _show_findings(reports: Sequence[FileReport]) -> None:
    """Errors and warnings on standard error; what is merely noted is left to `validate`."""
    from mooncake_v0.cli.validate import COLOURS
    from mooncake_v0.config import render

    serious = [
        replace(report, diagnostics=tuple(item for item in report.diagnostics if item.severity in (ERROR, WARNING)))
        for report in reports
    ]
    found = [report for report in serious if report.diagnostics]
    if found:
        text = render.as_text(found, lambda word, kind: click.style(word, fg=COLOURS[kind]))
        click.echo(text, err=True)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        from mooncake_v0.doctor.software import install_command

        raise CouldNotCheckError("vLLM is not installed in this environment", fix=install_command())


def _run(settings: Settings, stages: Sequence[Sequence[Command]]) -> int:
    from mooncake_v0.cli.launch_run import Runner, Stopped, notify_systemd, pid_file

    def log(command: Command) -> Path | None:
        if settings.log is None or settings.what != "pair":
            return settings.log
        settings.log.mkdir(parents=True, exist_ok=True)
        return settings.log / f"{command.name}.log"

    with pid_file(settings.pid), Runner(log, lambda line: click.echo(line, err=True)) as runner:
        try:
            with _progress(has_log=settings.log is not None) as progress:
                for stage in stages:
                    runner.start(stage, settings.timeout_s, progress)
            notify_systemd("READY=1")
            runner.wait()
        except Stopped:
            click.echo("stopping", err=True)
            notify_systemd("STOPPING=1")
    return 130 if runner.signal == 2 else 0


@contextlib.contextmanager
def _progress(*, has_log: bool) -> Iterator[Callable[[str, float], None]]:
    """A spinner while waiting; a line every 30 s where there is no terminal or the processes write to it."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and has_log:
        with console.status("starting") as spinner:
            yield lambda names, elapsed_s: spinner.update(f"waiting for {names}, {elapsed_s:.0f} s")
        return
    last: list[Any] = [None, 0.0]

    def line(names: str, elapsed_s: float) -> None:
        if names != last[0] or time.monotonic() - last[1] > 30:
            last[:] = [names, time.monotonic()]
            click.echo(f"waiting for {names}, {elapsed_s:.0f} s", err=True)

    yield line
