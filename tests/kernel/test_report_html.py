"""The report of a run is one page that needs nothing else, on any screen, in either theme."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from leeway.report_html import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROWS = [
    {
        "kind": "step",
        "step": step,
        "reward_mean": step / 10,
        "tokens_per_second": 1000.0 + step,
        "staleness_mean": 1.0,
        "staleness_budget": 2,
        "step_seconds": 4.0,
        "wait_seconds": 1.0,
    }
    for step in range(1, 9)
]
SUMMARY = {"steps": 8, "reward_last5": 0.6, "groups": {"committed": 8}}


def test_what_is_not_recorded_is_left_out_and_names_are_escaped() -> None:
    text = page("<b>run", SUMMARY, ROWS)
    assert "<b>run" not in text
    assert "Off-policy health" not in text
    assert text.count("<figure>") == 4
    assert "http" not in text
    assert "<figure>" not in page("run", SUMMARY, [])


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_chromium(tmp_path: Path, width: int, scheme: str) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    file = tmp_path / "report.html"
    file.write_text(page("run", SUMMARY, ROWS))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        assert tab.locator("details[open] td").count() == len(ROWS)
        browser.close()
