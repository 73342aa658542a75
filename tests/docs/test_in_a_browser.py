"""The site as a reader sees it, opened from its folder in a headless Chromium."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote_plus

import pytest

import fullshard
from tests.docs.browser import PHONE, Browser

SHOWN = ["index", "quickstart", "benchmarks", "limits", "reference", "cli", "environment"]
SHOWN += ["faults", "compat", "api/fullshard", "api/plan", "api/errors", "changelog"]


def address(site: Path, page: str) -> str:
    return (site / f"{page}.html").as_uri()


def test_the_first_screen_answers(site: Path, browser: Browser) -> None:
    browser.open(address(site, "index"))
    assert browser.evaluate("document.title") == f"fullshard {fullshard.__version__}"
    for words in ("Is it faster", "less memory", "Is it safer", "Does it work on GPUs"):
        place = (
            f"[...document.querySelectorAll('strong')].find(x => x.innerText.includes('{words}'))"
        )
        assert browser.evaluate(f"{place}.getBoundingClientRect().bottom < innerHeight")
    assert browser.complaints == []


def test_a_search_finds(site: Path, browser: Browser) -> None:
    browser.open(address(site, "search") + "?q=fully_shard")
    found = "[...document.querySelectorAll('#search-results li a')].map(a => a.href)"
    browser.wait_for(f"{found}.length > 5")
    assert any(
        link.endswith("api/fullshard.html#fullshard.fully_shard")
        for link in browser.evaluate(found)
    )
    browser.open(address(site, "search") + "?q=patience")
    browser.wait_for(f"{found}.length > 0")
    assert browser.complaints == []


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("hangs when a batch has no image", "symptoms"),
        ("every rank loads the whole model", "symptoms"),
        ("gradient norm DTensor", "symptoms"),
        ("export to Hugging Face", "symptoms"),
        ("resume optimizer state", "symptoms"),
        ("weights to vLLM", "recipes/weights-to-an-engine"),
        ("mixed torch.Tensor and DTensor", "symptoms"),
        ("host is the bottleneck", "symptoms"),
        ("reserved above allocated memory", "symptoms"),
        ("timeout which rank", "symptoms"),
    ],
)
def test_a_question_finds_its_answer_among_the_first_three(
    question: str, answer: str, site: Path, browser: Browser
) -> None:
    browser.open(address(site, "search") + f"?q={quote_plus(question)}")
    browser.wait_for("document.querySelector('#search-results').innerText.includes('finished')")
    found = "[...document.querySelectorAll('#search-results ul.search > li > a')].map(a => a.href)"
    browser.wait_for(f"{found}.length > 0")
    first = browser.evaluate(found)[:3]
    assert any(link.startswith(address(site, answer)) for link in first), first


def test_the_reference_shows_a_function_with_its_arguments(site: Path, browser: Browser) -> None:
    browser.open(address(site, "api/fullshard") + "#fullshard.fully_shard")
    shown = browser.evaluate(
        "document.querySelector('dl:has(> #fullshard\\\\.fully_shard)').innerText"
    )
    assert "reshard_after_forward" in shown and "Shard the parameters of module" in shown
    assert "PARAMETERS:" in shown.upper() and "RAISES:" in shown.upper()
    buttons = browser.evaluate("document.querySelectorAll('button.copybtn').length")
    browser.open(address(site, "quickstart"))
    assert browser.evaluate("document.querySelectorAll('button.copybtn').length") > buttons
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_as_dark_as_the_system(scheme: str, site: Path, browser: Browser) -> None:
    browser.open(address(site, "index"), scheme=scheme)
    color = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, color.strip("rgb()").split(",")[:3])) / 3
    assert (brightness < 128) == (scheme == "dark")


@pytest.mark.parametrize("page", SHOWN)
def test_a_phone_scrolls_in_one_direction(page: str, site: Path, browser: Browser) -> None:
    browser.open(address(site, page), PHONE)
    width = browser.evaluate("document.documentElement.scrollWidth")
    assert width == browser.evaluate("innerWidth") == PHONE[0]
    assert browser.complaints == []
