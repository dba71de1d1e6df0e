"""The `leeway` command. A service is imported only when its command runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import getpass
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
import typer
from pydantic import SecretStr
from rich.console import Console
from typer.core import TyperGroup

from leeway import config as configuration
from leeway import process, rpc, telemetry
from leeway.config import Config, SecurityConfig
from leeway.deploy.commands import app as deploy_app
from leeway.errors import ConfigError, InfrastructureError, LeewayError
from leeway.v1 import queue_pb2, queue_pb2_grpc

T = TypeVar("T")

_CHANGES_SHOWN = 5

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, e.g. trainer.lr=1e-5."),
]
Stay = Annotated[
    bool,
    typer.Option("--stay", help="When the run is finished, wait to be stopped, as pods must."),
]


class _ServeByDefault(TyperGroup):
    """`leeway queue run.yaml` means `leeway queue serve run.yaml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["serve", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="leeway",
    help="Asynchronous reinforcement learning of language-model agents on two clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
queue_app = typer.Typer(
    cls=_ServeByDefault, help="The trajectory queue service, and its operators' commands."
)
config_app = typer.Typer(help="The configuration.")
app.add_typer(queue_app, name="queue")
app.add_typer(config_app, name="config")
app.add_typer(deploy_app, name="deploy")


@app.command()
def up(
    path: ConfigArgument,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove what an earlier run of this name left.")
    ] = False,
) -> None:
    """Run both clusters on this machine and show the progress.

    A run that was interrupted goes on from its last checkpoint.
    """
    config = configuration.load(path, overrides or ())
    config.task.check_scored()
    run = config.run.path
    if fresh and run.exists():
        shutil.rmtree(run)
    if (run / "summary.json").exists():
        raise ConfigError(
            f"run.name = {config.run.name!r}: {run} holds a finished run; "
            "choose another run.name, or start with --fresh"
        )
    (run / "logs").mkdir(parents=True, exist_ok=True)
    config_path = run / "config.yaml"
    config_path.write_text(config.to_yaml(secret=None))
    raise typer.Exit(asyncio.run(_up(config, config_path)))


async def _up(config: Config, config_path: Path) -> int:
    from leeway import local, progress, report
    from trajectory_queue import page
    from trajectory_queue.embedded import redis_server

    console = Console()
    run = config.run.path
    started = time.monotonic()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    status: queue_pb2.StatusResponse | None = None
    try:
        with redis_server(config, run / "redis") as redis_url:
            async with (
                local.Supervisor(config, config_path, redis_url) as supervisor,
                _queue_stub(supervisor.queue_address, supervisor.security) as stub,
            ):
                read = functools.partial(_status, stub)
                url = page.link(supervisor.page_address, supervisor.security)
                console.print(f"Watch it at {url}", highlight=False, soft_wrap=True)
                view = asyncio.create_task(
                    progress.show(run / "metrics.jsonl", read, config.trainer.steps, console)
                )
                try:
                    await supervisor.run(stop)
                    status = await read()
                finally:
                    view.cancel()
                    await asyncio.wait({view})
    except LeewayError as error:
        console.print(f"The run ended: {error}", style="red", highlight=False, markup=False)
        return process.EXIT_CONFIG if isinstance(error, ConfigError) else process.EXIT_FAILED
    if stop.is_set() or status is None:
        console.print("Stopped; the same command goes on from the last checkpoint.")
        return process.EXIT_OK
    rows = report.read_rows(run)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    summary = report.summarize(
        rows,
        status,
        cpu_seconds=sum(u.ru_utime + u.ru_stime for u in usage),
        wall_seconds=time.monotonic() - started,
    )
    report.write(run, summary, rows)
    report.show(summary, run, console)
    return process.EXIT_OK


@asynccontextmanager
async def _queue_stub(
    address: str, security: SecurityConfig
) -> AsyncIterator[queue_pb2_grpc.TrajectoryQueueStub]:
    async with rpc.connect(address, security) as channel:
        yield queue_pb2_grpc.TrajectoryQueueStub(channel)


async def _status(
    stub: queue_pb2_grpc.TrajectoryQueueStub, deadline_seconds: float = 2.0
) -> queue_pb2.StatusResponse | None:
    """The queue's status; None while it does not answer."""
    try:
        return await rpc.call(
            stub.Status,
            queue_pb2.StatusRequest(),
            what="read the queue's status",
            deadline_seconds=deadline_seconds,
        )
    except InfrastructureError:
        return None


async def _changes(stub: queue_pb2_grpc.TrajectoryQueueStub) -> Sequence[queue_pb2.AuditRecord]:
    """The newest changes by operators and by `auto`; none while the queue does not answer."""
    try:
        answer: queue_pb2.ListAuditResponse = await rpc.call(
            stub.ListAudit,
            queue_pb2.ListAuditRequest(limit=_CHANGES_SHOWN),
            what="read the queue's audit",
            deadline_seconds=2.0,
        )
    except InfrastructureError:
        return ()
    return answer.records


@queue_app.command("serve")
def queue_serve(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Serve the trajectory queue."""
    config = _load_for_service(path, overrides, role="queue")
    import uvloop

    from trajectory_queue.main import serve

    # asyncio's own loop copies whatever megabytes a socket does not take at once.
    _run_service(lambda stop: serve(config, stop=stop), loop_factory=uvloop.new_event_loop)


@queue_app.command("budget")
def queue_budget(
    budget: Annotated[int, typer.Argument(min=0, help="In policy versions.")],
    path: ConfigArgument,
    overrides: Overrides = None,
) -> None:
    """Set the staleness budget of the running run; the change is audited."""
    previous = _operate(path, overrides, lambda queue: queue.set_budget(budget))
    typer.echo(f"staleness budget: {previous} -> {budget}")


@queue_app.command("dead")
def queue_dead(
    path: ConfigArgument,
    overrides: Overrides = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Give them all a fresh start.")
    ] = False,
) -> None:
    """List the tasks that were given up, with all their reasons."""
    for task in _operate(path, overrides, lambda queue: queue.dead()):
        typer.echo(task.task_id)
        for reason in task.reasons:
            typer.echo(f"  {reason}")
    if requeue:
        typer.echo(f"requeued: {_operate(path, overrides, lambda queue: queue.requeue())}")


@queue_app.command("inspect")
def queue_inspect(
    identifier: Annotated[str, typer.Argument(help="Of a task or a trajectory.")],
    path: ConfigArgument,
    overrides: Overrides = None,
) -> None:
    """Show where a task or a trajectory is, and what the queue holds of it."""
    from leeway.trajectory import Trajectory

    found = _operate(path, overrides, lambda queue: queue.inspect(identifier))
    typer.echo(f"task {found.task_id}: {found.state}, attempts: {found.attempts}")
    for reason in found.reasons:
        typer.echo(f"  {reason}")
    for message in found.group.trajectories:
        trajectory = Trajectory.from_wire(message)
        versions = ", ".join(f"{span.length} of {span.version}" for span in trajectory.versions)
        typer.echo(
            f"  {trajectory.trajectory_id}: {trajectory.prompt_length} + "
            f"{trajectory.response_length} tokens, by version: {versions}; "
            f"{trajectory.finish_reason.name.lower()}, score {trajectory.score}, "
            f"reward {trajectory.reward}, from {trajectory.node_id}"
        )


@queue_app.command("audit")
def queue_audit(path: ConfigArgument, overrides: Overrides = None) -> None:
    """List who changed the running queue, how and when, newest first."""
    for record in _operate(path, overrides, lambda queue: queue.audit()):
        at = datetime.fromtimestamp(record.at_seconds, UTC)
        typer.echo(f"{at:%Y-%m-%d %H:%M:%S} UTC  {record.actor}: {record.what}")


def _operate(path: Path, overrides: list[str] | None, ask: Callable[[Any], Awaitable[T]]) -> T:
    from trajectory_queue.client import OperatorQueue

    config = configuration.load(path, overrides or ())

    async def operate() -> T:
        async with rpc.connect(config.queue.address, config.security) as channel:
            return await ask(OperatorQueue(channel, actor=getpass.getuser()))

    return asyncio.run(operate())


@app.command()
def trainer(path: ConfigArgument, overrides: Overrides = None, stay: Stay = False) -> None:
    """Train on leased batches and broadcast new policies."""
    config = _load_for_service(path, overrides, role="trainer")
    from trainer_service.main import serve

    _run_service(lambda stop: serve(config, stop=stop), stay)


@app.command()
def sft(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Fine-tune on the rows' `answer` column, and export a model directory to start a run from."""
    _learn_offline(path, overrides, "sft")


@app.command()
def dpo(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Prefer the rows' `chosen` answers to their `rejected` ones, and export a model directory."""
    _learn_offline(path, overrides, "dpo")


def _learn_offline(path: Path, overrides: list[str] | None, lesson: str) -> None:
    config = _load_for_service(path, overrides, role="trainer")
    from trainer_service.offline import Lesson, serve

    _run_service(lambda stop: serve(config, Lesson(lesson), stop=stop))


@app.command()
def rollout(
    path: ConfigArgument,
    overrides: Overrides = None,
    node_id: Annotated[str, typer.Option(help="By default the host's name and the pid.")] = "",
    stay: Stay = False,
) -> None:
    """Generate, score and push trajectories."""
    node_id = node_id or f"{os.uname().nodename}-{os.getpid()}"
    config = _load_for_service(path, overrides, role="rollout", node=node_id)
    from rollout_service.main import serve

    _run_service(lambda stop: serve(config, node_id, stop=stop), stay)


@app.command()
def sandbox(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Run the reward function or environment for nodes, apart from them."""
    config = _load_for_service(path, overrides, role="sandbox")
    from rollout_service.sandbox.service import serve

    _run_service(lambda stop: serve(config, stop=stop))


@app.command()
def plan(
    profile: Annotated[
        str | None, typer.Argument(metavar="[PROFILE]", help="A file, or a published one's name.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="E.g. rollouts.nodes=16 over_budget=drop."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from", help="Take a recorded run's figures: runs/NAME.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each simulation.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Where plan.json and plan.png go.")] = None,
) -> None:
    """Predict throughput, idle time and staleness for every budget and split, by simulation."""
    from trajectory_queue.plan.command import plan as ask

    ask(profile, run, overrides or (), steps, out)


@config_app.command("show")
def config_show(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Print the resolved configuration; secrets are hidden."""
    typer.echo(configuration.load(path, overrides or ()).to_yaml(), nl=False)


@app.command()
def status(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Say what the run does and what each side waits for."""
    from leeway import panels
    from leeway.progress import waits

    config = configuration.load(path, overrides or ())

    async def ask() -> tuple[queue_pb2.StatusResponse | None, Sequence[queue_pb2.AuditRecord]]:
        async with _queue_stub(config.queue.address, config.security) as stub:
            return await _status(stub), await _changes(stub)

    answer, changes = asyncio.run(ask())
    if answer is None:
        raise InfrastructureError(
            f"queue.address = {config.queue.address}: no answer; is `leeway queue` running there?"
        )
    typer.echo(f"run {answer.run_id}: version {answer.version}, budget {answer.budget}")
    typer.echo(waits(answer))
    for name, count in sorted(answer.groups.items()):
        typer.echo(f"  {name}: {count}")
    typer.echo("newest changes:")
    for line in panels.changes(changes):
        typer.echo(f"  {line}")


@app.command()
def top(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Watch a running system: runs/NAME/live.yaml, or a deployment's configuration."""
    from leeway.top import Top

    config = configuration.load(path, overrides or ())

    async def watch() -> None:
        async with _queue_stub(config.queue.address, config.security) as stub:
            top = Top(
                config.run.path / "metrics.jsonl",
                functools.partial(_status, stub),
                functools.partial(_changes, stub),
            )
            await top.run_async()

    asyncio.run(watch())


@app.command()
def page(path: ConfigArgument, overrides: Overrides = None) -> None:
    """Print a link to the running queue's web page; off loopback it lasts a minute, for one use."""
    from trajectory_queue.page import link

    config = configuration.load(path, overrides or ())
    if config.queue.page_address is None:
        raise ConfigError("queue.page_address is not set: the queue serves no page")
    typer.echo(link(config.queue.page_address, config.security))


@app.command()
def weights(path: ConfigArgument, overrides: Overrides = None) -> None:
    """List the nodes: which policy each has, since when, and from whom; ! marks those that lag."""
    from trainer_service.weight_broadcast.listing import list_nodes

    config = configuration.load(path, overrides or ())
    version, rows = asyncio.run(list_nodes(config.weights.address, config.security))
    typer.echo(f"newest version: {version}")
    for row in rows:
        source = row.parent or "the publisher"
        alarm = "!" if row.lag > config.weights.kept_versions else " "
        typer.echo(
            f"{alarm} {row.node_id}: version {row.version} ({row.state}, {row.lag} behind), "
            f"{row.seconds_ago:.0f} s ago, from {source}"
            + (f": {row.message}" if row.message else "")
        )


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="A run's directory, e.g. runs/quickstart.")],
    port: Annotated[int, typer.Option(help="Of the page; by default a free one.")] = 0,
) -> None:
    """Show a run's recorded trajectories in a browser."""
    from transformers import AutoTokenizer

    from leeway import models
    from leeway.view import server

    config = configuration.load(run / "config.yaml")
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(config.model.path))
    with server(run, lambda token: str(tokenizer.decode([token])), port) as serving:
        typer.echo(f"http://127.0.0.1:{serving.server_port}  (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            serving.serve_forever()


@app.command()
def engine(
    base_url: Annotated[str, typer.Argument(help="Of an OpenAI-compatible server, with /v1.")],
    model: Annotated[str, typer.Argument(help="The name under which it serves the model.")],
) -> None:
    """Ask a server what it can do; the key is OPENAI_API_KEY."""
    from rollout_service.engines.capabilities import probe

    found = asyncio.run(probe(base_url, model, os.environ.get("OPENAI_API_KEY", "none")))
    typer.echo(
        "what it samples may be trained on"
        if found.trains
        else "it may serve evaluation and judges, never training"
    )
    typer.echo(f"missing: {', '.join(found.missing) or 'nothing'}")


@app.command()
def evaluate(
    path: ConfigArgument,
    url: Annotated[str, typer.Option(help="Of an OpenAI-compatible server, with /v1.")],
    model: Annotated[str, typer.Option(help="The name under which it serves the model.")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each problem.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
) -> None:
    """Score a run's held-out problems as another server answers them; the key is OPENAI_API_KEY."""
    from rollout_service.evaluation import evaluate as ask

    config = configuration.load(path, overrides or ())
    key = os.environ.get("OPENAI_API_KEY")
    server = configuration.EndpointConfig(
        url=url,
        model=model,
        api_key=SecretStr(key) if key else None,
        concurrency=concurrency,
        seconds=600.0,
    )
    result = asyncio.run(ask(config, server, samples))
    for failure in result.failures:
        typer.echo(f"not scored: {failure}", err=True)
    typer.echo(f"score {result.mean:.4f} over {len(result.scores)} answers")
    if result.failures:
        typer.echo(f"{len(result.failures)} answers could not be scored")


def _load_for_service(path: Path, overrides: list[str] | None, **identity: str) -> Config:
    config = configuration.load(path, overrides or ())
    telemetry.setup(config.telemetry, run=config.run.name, **identity)
    return config


def _run_service(
    main: Callable[[asyncio.Event], Awaitable[None]],
    stay: bool = False,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    async def serve(stop: asyncio.Event) -> None:
        await main(stop)
        if stay and not stop.is_set():
            structlog.get_logger(__name__).info("finished; waiting to be stopped")
            await stop.wait()

    # Not sys.exit: a thread inside a long tensor operation would hold the process back.
    code = process.run(serve, loop_factory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Entry point: errors that Leeway raises on purpose are one clear message, not a traceback."""
    try:
        app()
    except LeewayError as error:
        typer.echo(f"leeway: {error}", err=True)
        sys.exit(process.EXIT_CONFIG if isinstance(error, ConfigError) else process.EXIT_FAILED)


if __name__ == "__main__":
    main()
