"""Writes docs/job.md, the reference of all keys of a job, from `daskcnn.job.reference`.

`python docs/generate_job.py` writes the page; with `--check` it fails where the page is not what it would write.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from made_page import write_or_check

from daskcnn.job.reference import TableEntry, tables
from daskcnn.nn.layers import LAYERS

PAGE = Path(__file__).with_name("job.md")
HEAD = """# Keys of a job

<!-- Generated from the models in `daskcnn/job` and `daskcnn/ps` by docs/generate_job.py: do not edit. -->

A job is a TOML file of these tables, or flags (`python -m daskcnn.run --help`), or both. Any key can be set by
`--set section.key=value`. Every key has a default: an empty job trains `quick` on the built-in data set.
Unknown keys and values out of range are refused before anything starts, all at once.
"""

STEPS_HEAD = """## Steps of `data.augment`

`augment` may be a list of tables, each with the key `step` and the keys of that step.
[augmentation.md](augmentation.md) says what they do.
"""


LAYERS_HEAD = """## Layers of `model.layers`

A layer is a table with the key `layer` and the options of that layer. Options without a default are needed; `none`
stands for one that is left out.
Paths are lists of layers again.
[using.md](using.md) shows networks, and blocks with parameters.
"""


RULE = "## `[rule]`\n\nThe parameters of the update rule that `train.strategy` names. Strategy `layer` has no rule.\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(_section(table) for table in tables() if not table.member), RULE]
    parts += [_section(table) for table in tables() if table.name == "rule"]
    parts += [
        LAYERS_HEAD,
        _layers(),
        STEPS_HEAD,
        *(_section(table) for table in tables() if table.member and table.name != "rule"),
    ]
    return "\n".join(parts)


def _layers() -> str:
    """A table of all layers: options with their defaults, and what the layer does."""
    lines = ["| layer | options | meaning |", "|---|---|---|"]
    for kind, layer in LAYERS.items():
        options = ", ".join(f"`{option}`" for option in map(_option, fields(layer)))  # type: ignore[arg-type] # every layer is a dataclass
        meaning = (layer.__doc__ or "").partition("\n")[0]
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in (f'`{kind}`', options, meaning))} |")
    return "\n".join(lines) + "\n"


def _option(option: Field[Any]) -> str:
    if option.default is MISSING:
        return option.name
    return f"{option.name} = {'none' if option.default is None else json.dumps(option.default)}"


def _section(table: TableEntry) -> str:
    heading = f"### `{table.member}`" if table.member else f"{'###' if '.' in table.name else '##'} `[{table.name}]`"
    return f"{heading}\n\n{table.meaning}\n\n{_rows(table)}"


def _rows(table: TableEntry) -> str:
    if not table.keys:
        return "No keys.\n"
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in table.keys:
        cells = f"`{key.name}`", key.type, f"`{key.default}`" if key.default else "", key.meaning
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:]))
