"""`daskcnn models`."""

from __future__ import annotations

import json
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.planning.show_model import named_models
from daskcnn.show.network_text import readable_models


@click.command(cls=Command)
@as_json
@verbose
def models(as_json: bool, **_: Any) -> None:
    """List the networks that have a name: images, parameters, operations, and where they are from."""
    found = named_models()
    tell(json.dumps(found, indent=2) if as_json else readable_models(found))
