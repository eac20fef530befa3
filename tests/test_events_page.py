"""The reference of the event log says what `daskcnn.events` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from daskcnn import events

SCRIPT = Path(__file__).parents[1] / "docs" / "generate_events.py"


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_events", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: Any) -> None:
    assert generator.PAGE.read_text() == generator.page(), "run: python docs/generate_events.py"


def test_every_field_of_every_model_has_its_meaning_once(generator: Any) -> None:
    models = [m for m in vars(events).values() if isinstance(m, type) and issubclass(m, events.Fields)]
    for model in models:
        for name, (kind, meaning) in generator.fields_of(model).items():
            assert kind, (model, name)
            assert meaning.endswith("."), (model, name)


def test_the_page_has_every_event_and_every_row(generator: Any) -> None:
    page = generator.page()
    for model in events.EVENTS.values():
        assert f"## `{model.kind}` (`{model.__name__}`)" in page
    for row in ("CalibratedWorker", "LinkSpeed", "FormedGroup", "GroupMember", "StepWorker", "EpochWorker", "Judged"):
        assert f"(`{row}`):" in page
