"""`kvhub serve`: start an SGLang server that shares and reuses KV caches."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli.numbers import Number
from kvhub.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from kvhub.model.identity import ModelIdentity
    from kvhub_registry.records import MapperRow


@click.command()
@click.argument("model")
@click.option("--reuse-from", "sources", metavar="SOURCE", multiple=True, help="Map from this model's cache.")
@click.option("--mapper", "references", metavar="MAPPER", multiple=True, help="Use exactly this mapper.")
@click.option(
    "--exchange", metavar="PLACE", help="Directory shared by the servers, or mooncake://host:port?..."
)
@click.option("--exchange-gib", type=Number(min=0.001), default=4.0, show_default=True)
@click.option(
    "--mapper-gib", type=Number(min=0.001), help="Memory for mappers made ready; default: no bound."
)
@click.option("--max-hops", type=click.IntRange(1, 8), default=1, show_default=True, help="Mappers in a row.")
@click.option("--min-span", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens to save.")
@click.option(
    "--reuse",
    type=click.Choice(["asked", "hinted", "always", "off"]),
    default="asked",
    show_default=True,
    help="Which requests may be answered from mapped rows.",
)
@click.option(
    "--worth",
    type=click.Choice(["auto", "always"]),
    default="auto",
    show_default=True,
    help="auto: map only where that is measured to be faster than computing.",
)
@click.option(
    "--exact-prefix",
    metavar="N",
    type=click.IntRange(0, 4096),
    help="First tokens that are computed, not mapped.",
)
@click.option(
    "--native-tail",
    metavar="N",
    type=click.IntRange(0, 65536),
    default=0,
    help="Last tokens of the history that are computed, not mapped.",
)
@click.option(
    "--max-turn",
    metavar="N",
    type=click.IntRange(min=1),
    help="Last turn of a conversation to map; hints must say which turn it is. Default: no limit.",
)
@click.option(
    "--stage-wait-ms",
    metavar="MS",
    type=Number(0, 60000),
    default=1000.0,
    show_default=True,
    help="How long a request waits for its blocks.",
)
@click.option(
    "--publish",
    type=click.Choice(["all", "exact", "none"]),
    default="all",
    show_default=True,
    help="Blocks left in the exchange; exact is enough where all servers allow one hop.",
)
@click.option(
    "--publish-wait-ms",
    metavar="MS",
    type=Number(0, 10000),
    default=50.0,
    show_default=True,
    help="How long an answer waits for its blocks to be in the exchange.",
)
@click.option("--heal", is_flag=True, help="When idle, compute what was mapped.")
@click.option(
    "--shadow",
    metavar="SHARE",
    type=Number(0, 1),
    default=0.0,
    help="Share of mapped requests compared with native ones, when idle.",
)
@click.option("--allow-draft", is_flag=True, help="Serve mappers that have not passed the gate.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=30000, show_default=True)
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG_FLAGS...]")
def command(
    model: str,
    sources: tuple[str, ...],
    references: tuple[str, ...],
    exchange: str | None,
    exchange_gib: float,
    mapper_gib: float | None,
    max_hops: int,
    min_span: int,
    reuse: str,
    worth: str,
    exact_prefix: int | None,
    native_tail: int,
    max_turn: int | None,
    stage_wait_ms: float,
    publish: str,
    publish_wait_ms: float,
    heal: bool,
    shadow: float,
    allow_draft: bool,
    host: str,
    port: int,
    dry_run: bool,
    flags: tuple[str, ...],
) -> None:
    """Start SGLang serving MODEL (a directory or a Hub id), with kvhub in it.

    Its finished blocks go to the exchange; with --reuse-from or --mapper it also
    maps other models' blocks. Everything after -- goes to SGLang.
    """
    from kvhub.model.config import read_config
    from kvhub.model.identify import identify
    from kvhub.model.resolve import resolve
    from kvhub.serving import launch
    from kvhub.settings import Settings

    launch.require_sglang()
    given, rest = launch.take_dtype(flags)
    path = resolve(model)
    described = read_config(path)
    rows = [*_named(references), *_between(sources, path)]
    dtype = given or _dtype(rows, path, described.raw)
    # A directory's name says nothing on its own; the Hub id is found by identify.
    identity = identify(path, dtype=dtype)
    mappers = _choose(rows, identity, allow_draft)
    for row in mappers:
        _check_files(row)
    home = Settings.load().home
    content = launch.settings(
        path,
        mappers,
        lineage=_lineage(mappers, max_hops, allow_draft),
        exchange=_exchange(exchange, home),
        exchange_max_bytes=int(exchange_gib * 2**30),
        max_hops=max_hops,
        min_span=min_span,
        reuse=reuse,
        allow_draft=allow_draft,
        worth=worth,
        exact_prefix=exact_prefix,
        native_tail=native_tail,
        max_turn=max_turn,
        stage_wait_ms=stage_wait_ms,
        publish=publish,
        publish_wait_ms=publish_wait_ms,
        heal=heal,
        shadow=shadow,
        mapper_budget=None if mapper_gib is None else int(mapper_gib * 2**30),
        cost_file=home / "serving" / f"cost-{identity.digest[:16]}.json",
    )
    file = home / "serving" / f"{port}.json"
    plan = launch.launch(
        path,
        file,
        dtype=dtype,
        host=host,
        port=port,
        architectures=[described.architecture.name],
        flags=rest,
    )
    for row in mappers:
        click.echo(f"mapper {row.digest[:12]} {row.source.name} -> {row.target.name} ({row.state})", err=True)
    click.echo(f"KVHUB_SERVING={shlex.quote(str(file))} {shlex.join(plan.argv)}", err=True)
    if dry_run:
        return
    launch.require_free(host, port)
    launch.write_settings(file, content)
    os.execve(plan.argv[0], plan.argv, plan.environment)


def _named(references: tuple[str, ...]) -> list[tuple[str, list[MapperRow]]]:
    from kvhub.catalog import find

    return [(reference, [find(reference)]) for reference in references]


def _between(sources: tuple[str, ...], target: Path) -> list[tuple[str, list[MapperRow]]]:
    """For each source, the registered mappers from it to a model with the weights in `target`."""
    from kvhub.catalog import open_registry
    from kvhub.model.fingerprint import hub_snapshot, weights_revision

    if not sources:
        return []
    revision = weights_revision(target)
    snapshot = hub_snapshot(target)
    name = snapshot[0] if snapshot else target.name
    found = []
    with open_registry() as registry:
        for source in sources:
            if Path(source).expanduser().is_dir():
                wanted = weights_revision(Path(source).expanduser().absolute())
                rows = [row for row in registry.list() if row.source.revision == wanted]
            else:
                label, _, commit = source.partition("@")
                rows = registry.list(source=label)
                if commit:
                    rows = [row for row in rows if row.source.revision.startswith(f"commit:{commit}")]
            here = [row for row in rows if row.target.revision == revision]
            # Another revision of the same model: kept, so that the refusal can name it.
            found.append((source, here or [row for row in rows if row.target.name == name]))
    return found


def _choose(
    rows: list[tuple[str, list[MapperRow]]], identity: ModelIdentity, allow_draft: bool
) -> list[MapperRow]:
    from kvhub.serving.select import usable

    chosen: dict[str, MapperRow] = {}
    for what, candidates in rows:
        row = usable(candidates, identity, what=what, allow_draft=allow_draft)
        if (
            row.source.digest in {other.source.digest for other in chosen.values()}
            and row.digest not in chosen
        ):
            raise BadInput(f"two mappers from {row.source.name}", "name one of them with --mapper")
        chosen[row.digest] = row
    return list(chosen.values())


def _check_files(row: MapperRow) -> None:
    """Refuse a damaged mapper here: the server itself would only log that it does not use it."""
    from kvhub.artifact.read import verify_artifact
    from kvhub.catalog import files_of

    directory = files_of(row)
    if verify_artifact(directory, deep=True).digest != row.digest:
        raise Corrupt(f"{directory} holds another mapper than {row.digest[:12]}", "kvhub verify says more")


def _lineage(mappers: list[MapperRow], max_hops: int, allow_draft: bool) -> list[str]:
    """Digests of registered mappers that may lie under the sources' own rows (max_hops > 1)."""
    from kvhub.catalog import open_registry
    from kvhub_registry.records import State

    if max_hops == 1 or not mappers:
        return []
    allowed = {State.READY, State.DRAFT} if allow_draft else {State.READY}
    sources = {row.source.digest for row in mappers}
    with open_registry() as registry:
        return sorted(
            row.digest for row in registry.list() if row.target.digest in sources and row.state in allowed
        )


def _dtype(rows: list[tuple[str, list[MapperRow]]], path: Path, config: dict[str, object]) -> str:
    """What registered mappers from or to this model were fitted in; else float32 on a CPU, else the config's.

    A source served in another dtype than the mapper's would never be met: its identity differs.
    """
    from kvhub.catalog import open_registry
    from kvhub.model.fingerprint import weights_revision
    from kvhub.serving import cpu

    revision = weights_revision(path)
    named = [row for _, candidates in rows for row in candidates]
    with open_registry() as registry:
        for row in (*named, *registry.list()):
            for model in (row.target, row.source):
                if model.revision == revision:
                    return model.dtype
    if cpu.wanted():
        return "float32"
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return found if found in ("float16", "bfloat16", "float32") else "bfloat16"


def _exchange(named: str | None, home: Path) -> str:
    """The directory, absolute, or the URL, read once so that a mistake is said here."""
    if named is not None and "://" in named:
        from kvhub.exchange.mooncake_url import MooncakeAddress

        MooncakeAddress.parse(named).read_secret()
        return named
    from kvhub.exchange.root import check_root

    directory = Path(named) if named is not None else _default_exchange(home)
    directory = directory.expanduser().absolute()
    check_root(directory)  # the server itself would only log it
    return str(directory)


def _default_exchange(home: Path) -> Path:
    """Memory where there is a tmpfs, else the data directory; the same for all servers of a user."""
    shared = Path("/dev/shm")
    return shared / f"kvhub-{os.getuid()}" if shared.is_dir() else home / "exchange"
