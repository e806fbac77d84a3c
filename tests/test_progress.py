"""One progress bar: silent when told, one line where nothing can be redrawn."""

from __future__ import annotations

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
