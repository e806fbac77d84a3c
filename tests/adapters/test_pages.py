"""The examples of the pages on frameworks run as they stand, where the frameworks are."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
NEEDED = {
    "huggingface": ("transformers", "peft"),
    "lightning": ("lightning",),
    "flower": ("flwr",),
    "trackers": ("tensorboard", "mlflow"),
}
BLOCK = re.compile(r"^```python(?: title=\"[^\"]*\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", NEEDED)
def test_page(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = [name for name in NEEDED[page] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"make test-adapters has {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    path = PAGES / f"{page}.md"
    names: dict[str, object] = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in BLOCK.findall(path.read_text()):
            exec(compile(text, str(path), "exec"), names)


def test_an_example_fine_tunes_end_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDED["huggingface"]:
        pytest.importorskip(package, reason=f"make test-adapters has {package}")
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parents[2] / "examples" / "fine_tune.py"
    names: dict[str, object] = {"__name__": "example", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    main = names["main"]
    assert callable(main)
    assert main(steps=4) > 0
    assert "epsilon" in capsys.readouterr().out
