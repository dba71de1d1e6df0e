"""`leeway view` in a real browser: what it shows of a trajectory is what was recorded."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from leeway.errors import ConfigError, WireError
from leeway.trajectory import FinishReason, Group, Sampling, Task, Trajectory
from leeway.versions import VersionSpan
from leeway.view import describe, read_group, server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 20_000


def trajectory(index: int, **changes: Any) -> Trajectory:
    """<prompt> sampled <tool> sampled, then a second sequence."""
    mask = np.array([1, 1, 0, 0, 1, 0, 0, 1, 1], dtype=np.bool_)
    of_trained = mask.astype(np.float32)
    given: dict[str, Any] = {
        "trajectory_id": f"t/{index}",
        "task_id": "t",
        "index": index,
        "token_ids": np.arange(65, 65 + 3 + mask.size, dtype=np.int32),
        "prompt_length": 3,
        "logprobs": -0.5 * of_trained * np.arange(1, 10, dtype=np.float32),
        "loss_mask": mask,
        "versions": (VersionSpan(4, 4), VersionSpan(5, 5)),
        "finish_reason": FinishReason.STOP,
        "sampling": Sampling(),
        "reward": 0.25 + index,
        "score": 1.0,
        "reward_parts": {"format": 0.125},
        "branch_starts": (8,),
        "generation_seconds": 1.5,
        "extras": MappingProxyType(
            {
                "advantages": np.where(mask, np.float32(-1.5), np.nan).astype(np.float32),
                "log_ratios": np.where(mask, np.log(2.0), np.nan).astype(np.float32),
                "turn_rewards": np.array([0, 0.5, 0, 0, 0, 0, 0, 0, 0], dtype=np.float32),
            }
        ),
    }
    return Trajectory(**{**given, **changes})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    task = Task("t", 0, ({"role": "user", "content": "<b>bold?</b>"},), {"answer": 7}, 2,
                Sampling(), 0)  # fmt: skip
    plain = trajectory(0, extras={}, branch_starts=(), reward_parts={})
    groups = {"step-000001": (plain,), "step-000002": (trajectory(0), trajectory(1))}
    for name, trajectories in groups.items():
        data = Group(task, trajectories).to_wire().SerializeToString()
        (folder / f"{name}.pb").write_bytes(data)
    return folder.parent


def test_a_group_as_the_page_gets_it(run: Path) -> None:
    group = read_group(run / "trajectories" / "step-000002.pb")
    shown = describe(group, chr)["trajectories"][1]
    assert "".join(shown["tokens"]) == "ABCDEFGHIJKL"
    assert shown["mask"] == [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert shown["branches"] == [[0, 8], [8, 12]]
    assert shown["version"] == [None] * 3 + [4, 4, None, None, 5, None, None, 5, 5]
    assert shown["ratio"][3] == 2.0 and shown["ratio"][5] is None
    assert shown["advantage"][4] == -1.5
    assert shown["parts"] == {"format": 0.125}


def test_what_is_not_there_is_said(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="no trajectories are recorded"):
        server(tmp_path, chr)
    broken = run / "trajectories" / "broken.pb"
    broken.write_bytes(b"\xff\xff\xff")
    with pytest.raises(WireError, match="not a recorded group"):
        read_group(broken)


@pytest.fixture
def page(run: Path) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    from playwright.sync_api import sync_playwright

    serving = server(run, lambda token: "<" if token == 66 else chr(token))
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    faults: list[str] = []
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        opened = browser.new_page(viewport={"width": 1100, "height": 700})
        opened.set_default_timeout(SECONDS)
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.goto(f"http://127.0.0.1:{serving.server_port}/")
        opened.wait_for_selector(".token")
        yield opened
        browser.close()
    serving.shutdown()
    serving.server_close()
    assert faults == []


def colours(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        ".token", "all => all.map(one => one.style.background)"
    )
    return found


def test_people_read_a_rollout(page: Any, tmp_path: Path) -> None:
    # The newest step is open; text is text, not markup.
    assert page.locator("#groups button[aria-current=true]").inner_text() == "step-000002"
    assert page.locator(".token").nth(1).inner_text() == "<"
    assert page.locator(".turn.sampled").count() == 3
    assert page.locator(".branch").all_inner_texts() == ["sequence 1", "sequence 2"]
    assert "reward 0.5" in page.locator(".turn.sampled .who").first.inner_text()
    facts = {
        fact.get_attribute("data-fact"): fact.inner_text()
        for fact in page.locator("#facts div").all()
    }
    assert facts["reward"] == "reward 0.25"
    assert facts["format"] == "format 0.125"
    assert facts["trained"] == "trained 5"
    title = page.locator(".token").nth(3).get_attribute("title")
    assert "version 4" in title and "logprob -0.5" in title and "ratio 2" in title

    # Every colouring paints the sampled tokens, and only them; they differ from each other.
    paintings = {}
    for name in ("mask", "version", "logprob", "ratio", "advantage"):
        page.get_by_role("button", name=name, exact=True).click()
        painted = colours(page)
        assert [bool(one) for one in painted] == [c in "DEHKL" for c in "ABCDEFGHIJKL"]
        paintings[name] = painted
    assert len(set(map(tuple, paintings.values()))) == 5
    assert paintings["version"][3] != paintings["version"][7]
    assert "suppressed" in page.locator("#legend").inner_text()
    page.screenshot(path=str(tmp_path / "view.png"))

    # Other trajectories and steps, by mouse and by key.
    page.get_by_role("button", name="1: 1.25").click()
    assert page.locator("[data-fact=reward]").inner_text() == "reward 1.25"
    page.keyboard.press("k")
    page.wait_for_selector("#groups button[aria-current=true]:has-text('step-000001')")
    page.get_by_role("button", name="ratio", exact=True).click()
    assert "no ratio was recorded" in page.locator("#legend").inner_text()
    page.locator("summary").click()
    assert "<b>bold?</b>" in page.locator("#task").inner_text()
