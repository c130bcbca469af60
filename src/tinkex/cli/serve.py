"""`tinkex serve`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

__all__ = ["command"]


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8787, show_default=True, help="Port; 0 takes a free one.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where runs and checkpoints are kept.  [default: TINKEX_DATA_DIR or ~/.tinkex]",
)
@click.option(
    "--base-model",
    "base_models",
    multiple=True,
    metavar="NAME[=SOURCE]",
    help="A model to serve: a hub id, tinkex/tiny, or NAME=SOURCE with a directory or hub id as its "
    "source. May be given more than once.  [default: HuggingFaceTB/SmolLM2-135M-Instruct]",
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
)
@click.option("--database-url", help="PostgreSQL instead of a SQLite file in the data directory.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keys that may call, one `name: key` a line. Needed to listen beyond this machine.",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Without keys only requests to localhost and loopback addresses are served; this is another name that "
    "their Host header may have. May be given more than once.",
)
@click.option(
    "--snapshot-every",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Work on a model after which a snapshot is written; a crash costs about as much.",
)
@click.option(
    "--set",
    "chosen",
    multiple=True,
    metavar="NAME=NUMBER",
    help="A limit or a time of the service, by the name that its error message gives. "
    "May be given more than once.",
)
@click.option(
    "--body-limit",
    "body_limits",
    multiple=True,
    metavar="OPERATION=BYTES",
    help="Another size for the request bodies of an operation. May be given more than once.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="What each key may use at a time, such as models=20 or checkpoint_bytes=50GiB. May be given more "
    "than once. Names: requests, pending, results, journal_bytes, sessions, models, samplers, losses, checkpoint_bytes, "
    "telemetry_bytes.",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="A proxy on this machine forwards requests of others: none counts as made on this machine.",
)
@click.option("--engine", type=click.Choice(["torch", "fake"]), default="torch", hidden=True)
@click.option("--leased", is_flag=True, hidden=True, help="End with the last holder of a lease.")
def command(
    host: str,
    port: int,
    data_dir: Path | None,
    base_models: tuple[str, ...],
    device: str,
    dtype: str,
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

    Prints one line with its URL when it is ready.
    """
    from tinkex.server import serve
    from tinkex.server.auth import Keys
    from tinkex.server.bodies import read_body_limit
    from tinkex.server.quotas import Limits
    from tinkex.server.service import DEFAULT_MODEL, Settings, default_data_dir, read_setting

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = Settings(
        data_dir=(data_dir or default_data_dir()).expanduser().resolve(),
        base_models=base_models if base_models or leased else (DEFAULT_MODEL,),
        on_demand=leased,
        engine="fake" if engine == "fake" else "torch",
        device=device,
        dtype=dtype,
        database_url=database_url,
        allowed_hosts=allowed_hosts,
        body_limits=dict(map(read_body_limit, body_limits)),
        limits=Limits.of_options(limits),
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
        on_ready=lambda url: click.echo(f"tinkex is serving {served} at {url}"),
    )
