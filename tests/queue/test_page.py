"""The queue's page: what `top` shows, in a real browser, and for nobody who may not see it."""

from __future__ import annotations

import http.client
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from leeway.config import SecurityConfig
from leeway.deploy.credentials import Parts, make
from leeway.errors import ConfigError
from leeway.tokens import KeyFiles, Signer
from leeway.v1 import queue_pb2 as pb
from trajectory_queue import history as ring
from trajectory_queue.history import History
from trajectory_queue.page import AUDIENCE, link
from trajectory_queue.page import serving as page_serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MILLISECONDS = 20_000
EVERYWHERE = "0.0.0.0:0"


def status(step: int = 3, **changes: Any) -> pb.StatusResponse:
    given: dict[str, Any] = {
        "run_id": "run",
        "version": step,
        "budget": 2,
        "batch_groups": 8,
        "groups": {"waiting": 30, "running": 12, "queued": 4, "leased": 2},
        "counters": {"tokens": 1000 * step, "tokens_trained": 500 * step},
        "nodes": [
            pb.NodeStatus(node_id="<b>node</b>", version=2, leases=3),
            pb.NodeStatus(
                node_id="a-node-with-a-rather-long-name-7f9c6d5b8-x2x4q",
                version=3,
                waiting_for="the staleness budget: 24 of 24 groups are running, queued or leased",
                waiting_seconds=4,
            ),
        ],
        "trainer_waiting_for": "a batch: 2 of 8 groups are complete",
        "trainer_waiting_seconds": 3,
        "step_metrics": {
            "step": step,
            "reward_mean": step / 10,
            "tokens_per_second": 1200.0,
            "staleness_mean": 1.5,
            "staleness_max": 2,
            "staleness_budget": 2,
            "staleness_in_flight_mean": 0.5,
            "staleness_in_queue_mean": 1.0,
            "effective_sample_size": 0.9,
        },
    }
    return pb.StatusResponse(**{**given, **changes})


CHANGES = [pb.AuditRecord(at_seconds=60, actor="auto (both sides wait)", what="budget 1 -> 2")]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def filled(steps: int = 6) -> History:
    clock = Clock()
    history = History(clock)
    for step in range(1, steps + 1):
        history.add(status(step), CHANGES)
        clock.seconds += 10.0
    return history


def test_the_ring_is_bounded_and_holds_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "STEPS_KEPT", 4)
    view = filled(6).view()
    assert [step["step"] for step in view.steps] == [3, 4, 5, 6]
    assert view.pushed_per_second == 100.0
    assert [sample.get("trained") for sample in view.samples] == [None] + [50.0] * 5
    assert [sample["minute"] for sample in view.samples[-2:]] == [-20 / 60, -10 / 60]
    assert view.samples[-1]["idle_nodes"] == 1
    clock = Clock()
    history = History(clock)
    for _ in range(2 * ring.SAMPLES_KEPT):
        history.add(status(), ())
        clock.seconds += ring.SAMPLE_SECONDS
    assert len(history.view().samples) == ring.SAMPLES_KEPT


def test_what_a_resumed_trainer_does_again_is_shown_once() -> None:
    history = filled(6)
    history.add(status(4, version=4), ())
    assert [step["step"] for step in history.view().steps] == [1, 2, 3, 4]


def test_more_than_a_sample_a_period_is_not_kept() -> None:
    clock = Clock()
    history = History(clock)
    for _ in range(10):
        history.add(status(), ())
        clock.seconds += 1.0
    assert len(history.view().samples) == 2


Get = Callable[..., tuple[int, dict[str, str], str]]


@contextmanager
def getting(address: str, security: SecurityConfig, history: History) -> Iterator[Get]:
    with page_serving(address, security, "run", history) as url:
        port = int(url.rstrip("/").rpartition(":")[2])

        def get(path: str, **headers: str) -> tuple[int, dict[str, str], str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read().decode()
            finally:
                connection.close()

        yield get


def test_loopback_is_open_under_its_own_name_only() -> None:
    with getting("127.0.0.1:0", SecurityConfig(token="t" * 32), filled()) as get:
        code, headers, body = get("/")
        assert code == 200 and "Leeway: run" in body
        assert headers["Cache-Control"] == "no-store"
        assert get("/", Host="evil.example:80")[0] == 403
        assert get("/etc/passwd")[0] == 404
        assert get("/live")[2] in body


def test_off_loopback_only_tokens_secure_it(tmp_path: Path) -> None:
    for security in (SecurityConfig(), SecurityConfig(certificate="c", key="k", authority="a")):
        with (
            pytest.raises(ConfigError, match=r"queue\.page_address = '0\.0\.0\.0:0'"),
            page_serving(EVERYWHERE, security, "run", History()),
        ):
            pass
    with pytest.raises(ConfigError, match=r"security\.token_file"):
        link("queue.example:7100", SecurityConfig())


def test_off_loopback_an_operators_link_opens_a_session_once(tmp_path: Path) -> None:
    made = make(Parts("leeway", ("leeway-trainer-cluster",)), {}, datetime.now(UTC))
    for role, key in made["leeway-tokens"].items():
        (tmp_path / role).write_bytes(key)
    with getting(EVERYWHERE, SecurityConfig(accepted_tokens=tmp_path), filled()) as get:
        assert get("/")[0] == 401
        assert get("/", Cookie="leeway-page=guess")[0] == 401
        operator = SecurityConfig(token_file=tmp_path / "operator")
        token = link("queue.example:7100", operator).partition("?token=")[2]
        code, headers, _ = get(f"/?token={token}")
        assert code == 303 and headers["Location"] == "./"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert get(f"/?token={token}")[0] == 401, "a link opens once"
        session = cookie.partition(";")[0]
        assert get("/", Cookie=session)[0] == 200
        assert get("/live", Cookie=session)[0] == 200
        rollout = Signer(KeyFiles(tmp_path / "rollout"))
        assert get(f"/?token={rollout.token(AUDIENCE)}")[0] == 401, "of another role"
        other = Signer(KeyFiles(tmp_path / "operator")).token("/leeway.v1.TrajectoryQueue/Pause")
        assert get(f"/?token={other}")[0] == 401, "for another call"


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield launched
        launched.close()


def contrast(tab: Any, selector: str) -> float:
    """WCAG's ratio of an element's text to the page behind it."""
    colours = tab.evaluate(
        "selector => [getComputedStyle(document.querySelector(selector)).color, "
        "getComputedStyle(document.body).backgroundColor]"
        ".map(colour => colour.match(/[0-9.]+/g).slice(0, 3))",
        selector,
    )

    def luminance(colour: list[str]) -> float:
        parts = [float(part) / 255 for part in colour]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_people_watch_a_run(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    clock = Clock()
    history = History(clock)
    for step in range(1, 7):
        history.add(status(step), CHANGES)
        clock.seconds += 10.0
    faults: list[str] = []
    asked: list[str] = []
    with page_serving("127.0.0.1:0", SecurityConfig(), "run", history) as url:
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab.set_default_timeout(MILLISECONDS)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("console", lambda message: message.type == "error" and faults.append(message.text))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(url)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        for selector in ("section li", "h1", "#pause", "figcaption"):
            assert contrast(tab, selector) >= 4.5, selector
        text = tab.locator("main").inner_text()
        assert "a batch: 2 of 8 groups are complete" in text
        assert "places: 18 of 24 (75%)" in text
        assert "budget 1 -> 2, by auto (both sides wait)" in text
        assert "<b>node</b>" in text, "names are text, not markup"
        assert tab.locator("figure svg[role=img]").count() >= 10
        assert tab.locator("figure").count() == tab.locator("figure table").count()

        # By keyboard alone: every stop shows its focus, and a chart's numbers open.
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "pause"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.evaluate(outline) != "none"
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "nodes"
        tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.parentElement.open")
        assert tab.locator("details[open] tbody tr, details[open] tr").count() >= 6

        # It refreshes by itself; what was open and focused stays so.
        focused = tab.evaluate("document.activeElement.id")
        history.add(status(7, version=77), CHANGES)
        tab.locator("main li", has_text="version 77").wait_for()
        assert tab.evaluate("document.activeElement.id") == focused
        assert tab.locator("details[open]").count() == 1
        assert tab.evaluate("document.documentElement.scrollWidth") <= width

        # Paused, it stands still.
        tab.locator("#pause").focus()
        tab.keyboard.press("Space")
        assert tab.locator("#pause").get_attribute("aria-pressed") == "true"
        tab.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        assert all(one.startswith(url) for one in asked)
        tab.close()
    assert faults == []


def test_a_page_whose_queue_is_gone_says_so(browser: Any) -> None:
    with page_serving("127.0.0.1:0", SecurityConfig(), "run", filled()) as url:
        tab = browser.new_page()
        tab.set_default_timeout(MILLISECONDS)
        tab.goto(url)
        tab.wait_for_load_state("load")
    tab.locator("#said", has_text="does not answer").wait_for()
    tab.close()
