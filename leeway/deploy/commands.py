"""`leeway deploy ...`: what an operator runs before and after `helm install`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from leeway import config as configuration
from leeway import process

app = typer.Typer(help="Deployments: credentials, and a look at a running one.")


class Part(StrEnum):
    CERTIFICATES = "certificates"
    REDIS = "redis"
    TOKENS = "tokens"


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, e.g. queue.address=h:1."),
    ] = None,
    gpus: Annotated[int, typer.Option(help="So many must be visible here.")] = 0,
) -> None:
    """Look at a running deployment: reachability, TLS, versions, clocks, Redis, GPUs."""
    from leeway.deploy.check import check as look

    config = configuration.load(path, overrides or ())
    console = Console(soft_wrap=True, highlight=False)

    async def show() -> bool:
        good = True
        async for finding in look(config, gpus=gpus):
            mark, style = ("ok  ", "green") if finding.good else ("BAD ", "red")
            console.print(mark, style=style, end="")
            console.print(f"{finding.what}: {finding.detail}", markup=False)
            good = good and finding.good
        return good

    raise typer.Exit(process.EXIT_OK if asyncio.run(show()) else process.EXIT_FAILED)


@app.command()
def credentials(
    release: Annotated[str, typer.Option(help="Of the trainer cluster's chart.")],
    namespace: Annotated[str, typer.Option(help="Where the Secrets belong.")] = "default",
    server_name: Annotated[
        list[str] | None, typer.Option(help="What the servers' certificates say.")
    ] = None,
    only: Annotated[list[Part] | None, typer.Option(help="By default all of them.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write what is missing or ends soon, from a pod.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option(help="The same into a directory, a file for each key.")
    ] = None,
) -> None:
    """Make the Secrets of a deployment: an authority, certificates by role, tokens, a password.

    Prints them for `kubectl apply -f -`, applies them, or writes them as files.
    """
    from leeway.deploy import credentials as making
    from leeway.deploy.folder import Folder
    from leeway.deploy.kubernetes import Secrets

    parts = making.Parts(
        release,
        tuple(server_name or ["leeway-trainer-cluster"]),
        certificates=not only or Part.CERTIFICATES in only,
        redis=not only or Part.REDIS in only,
        tokens=not only or Part.TOKENS in only,
    )
    if not apply and directory is None:
        made = making.make(parts, {}, making.utc_now())
        manifests = [making.manifest(name, namespace, data) for name, data in made.items()]
        typer.echo(yaml.safe_dump_all(manifests, sort_keys=False), nl=False)
        return
    place = Folder(directory) if directory is not None else Secrets.of_this_pod(namespace)
    existing = place.read(making.names(parts))
    for name, data in making.make(parts, existing, making.utc_now()).items():
        place.write(name, data)
        typer.echo(f"wrote {name}")
