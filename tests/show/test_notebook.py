"""The display in a notebook: what it draws, how often, and where it is used."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.events import parse
from daskcnn.launch.jobs import progress_from_python
from daskcnn.show.renderers.notebook import EVERY, NotebookProgress, NotebookView, in_notebook
from tests.show.run_events import asynchronous, calibration, data_parallel, layer_sharded, round_of, start


class Notebook:
    """Keeps what is drawn in it, with a clock of its own."""

    def __init__(self) -> None:
        self.now, self.drawn = 0.0, list[str]()
        self.progress = NotebookProgress(self.display, now=lambda: self.now)

    def display(self, drawing: NotebookView) -> Notebook:
        self.drawn.append(drawing._repr_html_())
        return self

    def update(self, drawing: NotebookView) -> None:
        self.display(drawing)

    def show(self, *events: dict[str, Any], every: float = 10.0) -> str:
        with self.progress:
            for event in events:
                self.now += every
                self.progress.handle(parse(event))
        return self.drawn[-1]


@pytest.mark.parametrize("log", [data_parallel, asynchronous, layer_sharded])
def test_every_worker_has_a_row(log: Any) -> None:
    html = Notebook().show(*log())
    assert "<td>w0</td>" in html
    assert "<td>w1</td>" in html


def test_figures_progress_and_losses_are_shown() -> None:
    html = Notebook().show(*asynchronous())
    assert 'value="0.3400"' in html
    assert "validation 57.3 %" in html
    assert "killed" in html.partition("Out of the ordinary")[2]


def test_a_part_of_an_epoch_is_told_as_it_is() -> None:
    assert "epoch 0.75/1" in Notebook().show(start(epochs=1), calibration("w0"), round_of("w0", epoch=0.75))


def test_names_cannot_write_html() -> None:
    html = Notebook().show(*data_parallel(), {"event": "warning", "message": "<script>"}, round_of("<b>w\x1b"))
    assert "<script>" not in html
    assert "<b>w" not in html


def test_many_events_at_once_are_drawn_once() -> None:
    notebook = Notebook()
    notebook.show(*[round_of("w0")] * 100, every=EVERY / 1000)
    assert len(notebook.drawn) == 2


def test_a_lost_browser_ends_no_run() -> None:
    def gone(_: NotebookView) -> Any:
        raise OSError

    with NotebookProgress(gone) as progress:
        progress.handle(parse(round_of("w0")))


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_notebook() is None
    for kernel, expected in ((None, False), (object(), True)):
        shell = SimpleNamespace(kernel=kernel)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=None))
        assert (in_notebook() is not None) is expected
        assert isinstance(progress_from_python(), NotebookProgress) is expected
