"""`kvhub explain`: what a server would do with a prompt of a given length, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import ConfigDict, ValidationError

from kvhub.cli import output
from kvhub.errors import BadInput, Corrupt, NotFound
from kvhub.serving.policy import MapperPolicy, Policy

_MAX_BYTES = 1 << 20
_COLUMNS = (
    "mapper", "decision", "tokens", "exact", "mapped", "computed", "reuse_ms", "compute_ms", "reason"
)  # fmt: skip


class _Served(MapperPolicy):
    """What is read of one mapper; the server itself reads more."""

    model_config = ConfigDict(extra="ignore")


class _Read(Policy):
    """What is read of a settings file; the server itself reads more."""

    model_config = ConfigDict(extra="ignore")

    mappers: list[_Served]


@click.command()
@click.argument("server")
@click.option("--tokens", metavar="N", type=click.IntRange(1, 1 << 24), required=True, help="Prompt tokens.")
@click.option("--held", metavar="N", type=click.IntRange(0), default=0, help="Of them, held exactly there.")
@click.option("--new", metavar="N", type=click.IntRange(0), default=1, help="Of them, new to both models.")
@click.option(
    "--turn", metavar="N", type=click.IntRange(1), help="Which turn of its conversation hints say it is."
)
@output.format_option("table", "json", "tsv")
def command(server: str, tokens: int, held: int, new: int, turn: int | None, form: str) -> None:
    """Say whether SERVER would map a history or compute it.

    SERVER is a port of `kvhub serve` on this machine, or a settings file; what it measured is read from its
    cost file, which a running server writes every half minute. The source is taken to hold the whole history.
    """
    settings = _settings(server)
    if held + new > tokens:
        raise BadInput(f"{held} held and {new} new tokens are more than {tokens}")
    found = explain(settings, tokens, held, new, turn)
    if form == "json":
        output.as_json(found)
        return
    if form == "tsv":
        output.tsv(_COLUMNS, [{**row, "tokens": tokens} for row in found["mappers"]])
        return
    for row in found["mappers"]:
        click.echo(f"mapper {row['mapper'][:12]}: {row['decision']} ({output.clean(row['reason'])})")
        click.echo(f"  {row['exact']} exact, {row['mapped']} mapped, {row['computed']} computed")
    if not found["mappers"]:
        click.echo("no mapper is served: only its own rows are reused")


def explain(settings: _Read, tokens: int, held: int, new: int, turn: int | None = None) -> dict[str, Any]:
    """The decision for each mapper of a settings file, as `kvhub_sglang.decide` takes it.

    Blocks are whole: of the history, only full blocks of 64 tokens can be mapped, and never the last token.
    """
    from kvhub.exchange import BLOCK_TOKENS
    from kvhub.serving.cost import CostModel

    model = CostModel.load(Path(settings.cost_file)) if settings.cost_file else CostModel()
    rows = []
    for served in settings.mappers:
        reach = min(tokens - new, tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        exact = max(held, min(served.exact_prefix or 0, reach))
        reach = max(exact, reach - served.native_tail)
        count = reach - exact
        cost = model.judge(
            prompt=tokens,
            held=held,
            reach=reach,
            mapped={served.digest: count},
            blocks=-(-count // BLOCK_TOKENS),
        )
        decision, reason = "map", cost.reason
        if settings.worth == "always" and not cost.worth:
            reason = f"worth is always, although {cost.reason}"
        if settings.reuse == "off" or served.state == "retired":
            decision, reason = "compute", "declined: reuse is off or the mapper is retired"
        elif served.max_turn is not None and (turn is None or turn > served.max_turn):
            said = "no hint says which turn it is" if turn is None else f"turn {turn}"
            decision, reason = "compute", f"turns: {said}, max_turn {served.max_turn}"
        elif count < (least := max(settings.min_span, served.min_span or 1)):
            decision, reason = "compute", f"short: {count} tokens to gain, min_span {least}"
        elif settings.worth == "auto" and not cost.worth:
            decision, reason = "compute", f"not_worth_it: {cost.reason}"
        mapped = count if decision == "map" else 0
        rows.append(
            {
                "mapper": served.digest,
                "decision": decision,
                "reason": reason,
                "exact": exact if mapped else held,
                "mapped": mapped,
                "computed": tokens - mapped - (exact if mapped else held),
                "reuse_ms": cost.reuse_ms,
                "compute_ms": cost.compute_ms,
            }
        )
    return {"tokens": tokens, "held": held, "new": new, "mappers": rows, "measured": model.terms()}


def _settings(server: str) -> _Read:
    from kvhub.settings import Settings
    from kvhub.strict_json import first_fault, parse_object, read_bounded

    path = Path(server)
    if server.isdecimal():
        path = Settings.load().home / "serving" / f"{server}.json"
    if path.is_dir():
        raise Corrupt(f"{path} is not a settings file")
    try:
        found = parse_object(read_bounded(path, limit=_MAX_BYTES, follow_symlinks=True), str(path))
    except NotFound:
        raise NotFound(f"no settings of a server at {path}", "name the port of a `kvhub serve`") from None
    try:
        return _Read.model_validate(found)
    except ValidationError as error:
        raise Corrupt(f"{path} is not a settings file: {first_fault(error)}") from None
