"""`tinkex serve`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import click

__all__ = ["command"]


class EngineCount(click.ParamType[int | Literal["auto"]]):
    """A number of at least 1, or `auto`."""

    name = "engines"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"must be a number of at least 1, or auto, got {value!r:.60}", param, ctx)
        return number


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8787, show_default=True, help="Port; 0 chooses a free one.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for runs and checkpoints.  [default: TINKEX_DATA_DIR or ~/.tinkex]",
)
@click.option(
    "--base-model",
    "base_models",
    multiple=True,
    metavar="NAME[=SOURCE]",
    help="A model to serve: a hub id, tinkex/tiny, or NAME=SOURCE, where SOURCE is a directory or hub "
    "id. May be repeated.  [default: HuggingFaceTB/SmolLM2-135M-Instruct]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    show_default=True,
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type of the products with the frozen weights. auto: bfloat16 where the device computes it natively, else float32.",
)
@click.option(
    "--engines",
    type=EngineCount(),
    default="1",
    show_default=True,
    metavar="N|auto",
    help="Engine processes that share the work. auto: one per GPU, and one on a machine without.",
)
@click.option(
    "--ray",
    metavar="ADDRESS|auto|local",
    help="Run the engines on a Ray cluster: HOST:PORT of its head, auto for the one that this machine belongs to, "
    "local for a new one on this machine. With --engines auto, as many as it has room for.",
)
@click.option(
    "--engine-gpus",
    type=click.FloatRange(min=0),
    metavar="G",
    help="GPUs of each engine on Ray.  [default: 1 if the cluster has any]",
)
@click.option(
    "--engine-cpus",
    type=click.FloatRange(min=0),
    metavar="C",
    help="Processors of each engine on Ray.  [default: 1]",
)
@click.option(
    "--shared-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory that every node of the Ray cluster sees under the same path. Checkpoints in it are not sent.",
)
@click.option(
    "--sampler",
    type=click.Choice(["own", "vllm"]),
    default="own",
    show_default=True,
    help="What samples: the engines that train, or vLLM in a process of its own.",
)
@click.option(
    "--sampler-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The Python of the environment in which vLLM is installed.  [default: this one]",
)
@click.option(
    "--database-url",
    help="URL of a PostgreSQL database, instead of a SQLite file in the data directory.",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the accepted keys, one `name: key` per line. Required for addresses other than loopback.",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Without keys, the Host header of a request must be localhost or a loopback address; this option "
    "allows another name. May be repeated.",
)
@click.option(
    "--snapshot-every",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds of work on a model between two snapshots; after a crash about as much work is repeated.",
)
@click.option(
    "--set",
    "chosen",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Change a limit or a time of the service; error messages give its name. May be repeated.",
)
@click.option(
    "--body-limit",
    "body_limits",
    multiple=True,
    metavar="OPERATION=BYTES",
    help="Largest request body of one operation. May be repeated.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="Limit per key, such as models=20 or checkpoint_bytes=50GiB. May be repeated. Names: requests, pending, results, journal_bytes, sessions, models, samplers, losses, checkpoint_bytes, "
    "telemetry_bytes, metric_bytes.",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="A proxy on this machine forwards requests of others: treat every request as remote.",
)
@click.option("--engine", type=click.Choice(["torch", "fake"]), default="torch", hidden=True)
@click.option("--leased", is_flag=True, hidden=True, help="Stop when the last lease ends.")
def command(
    host: str,
    port: int,
    data_dir: Path | None,
    base_models: tuple[str, ...],
    device: str,
    dtype: str,
    engines: int | Literal["auto"],
    ray: str | None,
    engine_gpus: float | None,
    engine_cpus: float | None,
    shared_dir: Path | None,
    sampler: str,
    sampler_python: Path | None,
    database_url: str | None,
    api_key_file: Path | None,
    allowed_hosts: tuple[str, ...],
    snapshot_every: float,
    chosen: tuple[str, ...],
    body_limits: tuple[str, ...],
    limits: tuple[str, ...],
    behind_proxy: bool,
    engine: str,
    leased: bool,
) -> None:
    """Run the local service until Ctrl-C.

    When the service is ready, prints its URL, and the base URL for programs that speak OpenAI's or Anthropic's API.
    """
    from tinkex._local import check_platform

    check_platform()
    from tinkex.server import serve
    from tinkex.server.auth import Keys
    from tinkex.server.bodies import read_body_limit
    from tinkex.server.quotas import KeyLimits
    from tinkex.server.service import DEFAULT_MODEL, Settings, default_data_dir, read_setting

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = Settings(
        data_dir=(data_dir or default_data_dir()).expanduser().resolve(),
        base_models=base_models if base_models or leased else (DEFAULT_MODEL,),
        on_demand=leased,
        engine="fake" if engine == "fake" else "torch",
        device=device,
        dtype=dtype,
        engines=engines,
        ray=ray,
        engine_gpus=engine_gpus,
        engine_cpus=engine_cpus,
        shared_dir=None if shared_dir is None else shared_dir.resolve(),
        sampler="vllm" if sampler == "vllm" else "own",
        sampler_python=sampler_python,
        database_url=database_url,
        allowed_hosts=allowed_hosts,
        body_limits=dict(map(read_body_limit, body_limits)),
        limits=KeyLimits.of_options(limits),
        behind_proxy=behind_proxy,
        keys=Keys.open() if api_key_file is None else Keys.from_file(api_key_file),
        **{"snapshot_every": snapshot_every, **dict(map(read_setting, chosen))},
    )
    named = ", ".join(name.partition("=")[0] for name in settings.base_models)
    served = named or "base models on demand"
    serve.run(
        settings,
        host,
        port,
        leased=leased,
        on_ready=lambda url: _say_ready(served, url, leased=leased),
    )


def _say_ready(served: str, url: str, *, leased: bool) -> None:
    click.echo(f"tinkex is serving {served} at {url}")
    if not leased:  # the script that started a leased service reads one line
        click.echo(
            f"For OpenAI clients: base_url={url}/v1    For Anthropic clients: base_url={url}"
        )
        click.echo("The same address in a browser is the dashboard. Ctrl-C stops the service.")
