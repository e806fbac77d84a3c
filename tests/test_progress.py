"""One progress bar: silent when told, one line where nothing can be redrawn."""

from __future__ import annotations

import builtins
import importlib.machinery
import sys
import types
from typing import Any

import pytest

from diminuendo import _progress


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.bar("training", total=3, shown=False) as bar:
        bar.update(2, note="half")
        bar.advance()
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_the_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.bar("training", total=4) as bar:
        bar.advance(3)
        bar.update(4, note="ε ≤ 2")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("training") == 1
    assert "100%" in err
    assert "ε ≤ 2" in err


def test_a_notebook_without_widgets_gets_one_line_that_is_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_plain_notebook", lambda: True)
    with _progress.bar("reading") as bar:
        bar.update(1, total=4, note="a long note")
        bar.update(1, total=4, note="a long note")
        bar.advance()
    assert capsys.readouterr().err == "\rreading 25% a long note\rreading 50%" + " " * 12 + "\n"


def test_nobody_watches_a_captured_stderr() -> None:
    assert not _progress.watched()
    with _progress.working("thinking"):
        pass


class ZMQInteractiveShell:
    """The class by which a notebook is known."""


class Output:
    """An ipywidgets.Output that remembers what was drawn into it."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.cleared = 0

    def clear_output(self, wait: bool = False) -> None:
        assert wait  # else it flickers
        self.cleared += 1

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A notebook, as far as rich can tell, and what is displayed in it."""
    displayed: list[Any] = []
    display = types.ModuleType("IPython.display")
    display.__dict__.update(
        display=lambda *parts, **_: displayed.extend(parts),
        HTML=str,
        DisplayObject=object,
        clear_output=lambda **_: None,
    )
    parent = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", parent)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shell = ZMQInteractiveShell()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return displayed


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("ipywidgets")
    made.__dict__.update(Output=Output)
    made.__spec__ = importlib.machinery.ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", made)


@pytest.fixture
def no_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else find(name)
    )


@pytest.mark.usefixtures("widgets")
def test_in_a_notebook_one_output_is_drawn_again(
    notebook: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _progress.watched()
    with _progress.bar("training", total=4) as bar:
        bar.update(2, note="ε ≤ 1")
        bar.update(4, note="ε ≤ 2")
    outputs = [part for part in notebook if isinstance(part, Output)]
    assert len(outputs) == 1
    assert outputs[0].cleared >= 1
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("no_widgets")
def test_in_a_notebook_without_widgets_one_line_is_written_over(
    notebook: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _progress.watched()
    with _progress.bar("training", total=2) as bar:
        bar.advance()
        bar.update(2, note="ε ≤ 2")
    assert notebook == []
    assert capsys.readouterr().err == "\rtraining 50%\rtraining 100% ε ≤ 2\n"


@pytest.mark.usefixtures("no_widgets", "notebook")
def test_many_steps_do_not_flood_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.bar("training", total=50_000) as bar:
        for step in range(1, 50_001):
            bar.update(step, note=f"{step}/50000")
    err = capsys.readouterr().err
    assert 100 <= err.count("\r") < 5000
    assert err.endswith("\rtraining 100% 50000/50000\n")


@pytest.mark.usefixtures("no_widgets", "notebook")
def test_work_in_a_notebook_is_said_and_wiped(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.working("planning"):
        assert capsys.readouterr().err == "\rplanning …"
    assert capsys.readouterr().err == "\r          \r"


@pytest.mark.usefixtures("no_widgets", "notebook")
def test_a_whole_run_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from torch import nn

    import diminuendo as dim
    from diminuendo.training import fit

    plan = dim.plan(dim.Budget(epsilon=4, delta=1e-5), examples=20, parameters=6, steps=3)
    data = (torch.randn(20, 2), torch.arange(20) % 2)
    capsys.readouterr()
    fit(nn.Linear(2, 2), data, plan, loss=nn.CrossEntropyLoss(reduction="none"), lr=0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "training 33% 1/3 ε ≤ " in err
    assert err.rstrip().endswith("ε ≤ 4")
