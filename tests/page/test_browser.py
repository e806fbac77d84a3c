"""The page in a real browser: drag, keys, phone width, dark colours, files, errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser

from diminuendo import Budget, Plan, plan
from diminuendo.cli import main

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
READY = (
    "document.body.dataset.state === 'ready' && document.getElementById('t-needs').textContent"
    " !== '…' && document.getElementById('t-steps').textContent !== '–'"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    browser.size(1400, 1000)
    browser.open("about:blank")
    browser.console.clear()
    yield browser
    assert browser.console == []


def text(page: Browser, name: str) -> str:
    return str(page.run(f"document.getElementById('{name}').textContent"))


def put(page: Browser, name: str, value: Any) -> None:
    """Type a value into a box."""
    page.run(
        f"(() => {{ const box = document.getElementById('{name}'); box.value = '{value}';"
        "box.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def settled(page: Browser, expected: str) -> None:
    """Until the page shows its answer and an expression holds."""
    page.wait(f"{READY} && ({expected})")


def test_numbers_follow_the_form(page: Browser, address: str) -> None:
    page.open(address)
    settled(page, "true")
    assert text(page, "t-epsilon") == "ε = 4"
    assert page.run("document.querySelectorAll('#c-noise path.line').length") == 2
    put(page, "epsilon", 2)
    settled(page, "document.getElementById('t-epsilon').textContent === 'ε = 2'")
    made = plan(
        Budget(epsilon=2, delta=1e-8),
        examples=1000,
        parameters=71010,
        clip=4,
        steps=100,
        gamma=0.95,
    )
    assert f"σ from {made.sigmas[0]:.4g} to {made.sigmas[-1]:.4g}" == text(page, "t-sigma")
    settled(page, "document.getElementById('file').textContent.startsWith('{')")
    assert made.digest == text(page, "digest")
    assert "epsilon=2" in page.run("location.hash")


def test_dragging_and_keys(page: Browser, address: str) -> None:
    page.open(address)
    settled(page, "true")
    page.run("document.querySelector('[data-name=steps] input[type=range]').focus()")
    before = int(page.run("document.getElementById('steps').value"))
    for _ in range(12):
        page.press("ArrowRight")
    after = int(page.run("document.getElementById('steps').value"))
    assert after > before
    settled(page, f"document.getElementById('t-steps').textContent === '{after}'")
    page.run("document.querySelector('input[name=lr][value=constant]').focus()")
    page.press("ArrowRight")
    settled(page, "!document.getElementById('f-lr').hidden")
    assert page.run("document.querySelector('input[name=lr]:checked').value") == "linear"
    page.run("document.getElementById('c-noise').focus()")
    page.press("End")
    assert text(page, "r-noise").startswith(f"step {after}: σ = ")
    page.run("document.querySelector('[data-file=\"plan.json\"]').focus()")
    page.press("ArrowRight")
    assert 'lr="linear"' in text(page, "file")
    page.press("ArrowRight")
    assert "LambdaNoise" in text(page, "file")


def test_wrong_values_are_said_and_mended(page: Browser, address: str) -> None:
    page.open(address)
    settled(page, "true")
    put(page, "steps", "0")
    page.wait("!document.getElementById('error').hidden")
    assert "steps takes a whole number from 1 to 20,000" in text(page, "error")
    assert page.run("document.getElementById('steps').getAttribute('aria-invalid')") == "true"
    assert text(page, "t-steps") == "100"
    assert page.run("document.body.classList.contains('wrong')") is True
    put(page, "steps", "30")
    settled(page, "document.getElementById('t-steps').textContent === '30'")
    assert page.run("document.getElementById('error').hidden")
    assert page.run("document.body.classList.contains('wrong')") is False
    page.run("document.querySelector('input[name=lr][value=joint]').click()")
    put(page, "momentum", "0.9")
    page.wait("!document.getElementById('error').hidden")
    assert "momentum" in text(page, "error")
    page.console.clear()  # the browser itself notes an answer of 422


def test_a_state_can_be_linked_to(page: Browser, address: str) -> None:
    page.open(f"{address}#epsilon=1&known=kappa&kappa=30&steps=auto&lr=nonsense&x=<b>&gamma=")
    settled(page, "document.getElementById('t-epsilon').textContent.startsWith('ε = 1')")
    assert page.run("document.getElementById('kappa').closest('.row').hidden") is False
    assert page.run("document.getElementById('gamma').closest('.row').hidden") is True
    assert page.run("document.getElementById('auto').checked") is True


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (320, False), (1400, True)])
def test_every_width_and_colour(page: Browser, address: str, width: int, dark: bool) -> None:
    page.size(width, 844, dark=dark, phone=width < 500)
    page.open(address)
    settled(page, "true")
    assert page.run("document.documentElement.scrollWidth") <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in background[4:-1].split(",")]
    assert (max(channels) < 60) is dark
    assert page.run(
        "[...document.querySelectorAll('#form input:not([type=radio])')]"
        ".filter((i) => i.offsetParent && i.getBoundingClientRect().right > innerWidth).length"
    ) == 0  # fmt: skip


def test_downloads(page: Browser, address: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.open(f"{address}#steps=20")
    settled(page, "document.getElementById('file').textContent.startsWith('{')")
    page.run("document.getElementById('save').click()")
    end = time.monotonic() + 300
    while not (folder / "plan.json").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert Plan.from_json((folder / "plan.json").read_text()).steps == 20


def test_a_snapshot_from_a_file(page: Browser, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert main(["page", "--steps", "20", "--epsilon", "3", "-o", str(target)]) == 0
    page.open(target.as_uri())
    settled(page, "true")
    assert text(page, "t-epsilon") == "ε = 3"
    assert page.run("document.getElementById('epsilon').matches(':disabled')") is True
    assert json.loads(text(page, "file"))["steps"] == 20
    assert "A snapshot" in text(page, "about")


def test_a_long_drag_ends_at_its_last_value(page: Browser, address: str) -> None:
    """Many changes in a row, over settings that take long: only the newest counts in the end."""
    page.open(f"{address}#steps=40&sampling_rate=0.05&delta=1e-5")
    settled(page, "true")
    page.run(
        "(() => { const s = document.querySelector('[data-name=epsilon] input[type=range]');"
        "let at = 40; const go = () => { s.value = at; s.dispatchEvent(new Event('input'));"
        "if ((at += 4) <= 160) setTimeout(go, 15); else window.dragged = true; }; go(); })()"
    )
    page.wait("window.dragged")
    last = page.run("document.getElementById('epsilon').value")
    settled(page, f"document.getElementById('t-delta').textContent.startsWith('of {last} ')")
    assert float(text(page, "t-epsilon").removeprefix("ε = ")) <= float(last)
