"""`kvhub trust`: whose mappers this machine takes."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.output import Column
from kvhub.errors import BadInput

COLUMNS = (Column("name", "PUBLISHER"), Column("key", "PUBLIC KEY"))


@click.command()
@click.argument("name", required=False)
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Trust NAME no longer.")
@click.option(
    "--require/--no-require", default=None, help="Take only mappers that a listed publisher signed."
)
@output.format_option("table", "json")
def command(name: str | None, key: str | None, remove: bool, require: bool | None, form: str) -> None:
    """Show the trust policy; with NAME and KEY allow a publisher.

    It is trust.json in KVHUB_HOME, or the file that KVHUB_TRUST names, and may
    also list the Hub namespaces that pull takes from.
    """
    from pydantic import ValidationError

    from kvhub.settings import Settings
    from kvhub.store import trust
    from kvhub.strict_json import first_fault

    if remove and name is None:
        raise BadInput("whom to trust no longer?", "kvhub trust NAME --remove")
    settings = Settings.load()
    policy = trust.load(settings, absent=name is not None or require is not None)
    content = policy.model_dump()
    if name is not None and remove:
        if content["publishers"].pop(name, None) is None:
            raise BadInput(f"{name!r} is not listed", "kvhub trust shows who is")
    elif name is not None:
        if key is None:
            raise BadInput(
                f"which key has {name!r}?", "kvhub trust NAME KEY; kvhub sign --new-key prints one"
            )
        content["publishers"][name] = key
    if require is not None:
        content["require_signature"] = require
    if name is not None or require is not None:
        try:
            policy = trust.Policy(**content)
        except ValidationError as error:
            raise BadInput(first_fault(error), "a public key is 64 hex digits") from None
        trust.save(policy, settings)
    if form == "json":
        output.as_json(policy.model_dump())
        return
    if policy.publishers:
        shown = [{"name": output.clean(owner), "key": known} for owner, known in policy.publishers.items()]
        output.table(COLUMNS, shown)
    rule = "required" if policy.require_signature else "not required"
    where = "" if policy.namespaces is None else f"; only from {', '.join(policy.namespaces)}"
    output.note(f"signatures are {rule}{where}")
