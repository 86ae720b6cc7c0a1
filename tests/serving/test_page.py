"""The page at `/`, in a browser without a window: where Chromium is installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from tests.serving.support import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLAN = {"draft": {"layer": 3}, "check": {"layer": 6}, "num_draft_tokens": 2}
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--dump-dom"),
)
# The page is dumped once it has loaded, and so with an image that comes only after the answer.
ASK = """<img src="/held" alt=""><script>
at("prompt").value = "one two three"; at("max_tokens").value = 40;
ask().finally(() => fetch("/shown"));
</script></body>"""


class Spans(HTMLParser):
    """The texts of a page by the id that they stand in, and the pieces of the answer by their class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pieces: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self._id = self._tier = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._id = given.get("id") or (self._id if tag == "span" else "")
        self._tier = given.get("class") or "" if tag == "span" else ""

    def handle_endtag(self, tag: str) -> None:
        self._tier = ""
        self._id = self._id if tag == "span" else ""

    def handle_data(self, data: str) -> None:
        self.texts[self._id] = self.texts.get(self._id, "") + data
        if self._id == "answer" and self._tier:
            self.pieces.append((self._tier, data))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_prompt_is_answered_in_pieces_by_tier(tiny_path: Path, tmp_path: Path) -> None:
    page = (files("hispec.serving") / "page.html").read_text(encoding="utf-8")
    driven, shown = page.replace("</body>", ASK), asyncio.Event()

    async def held() -> Response:
        await asyncio.wait_for(shown.wait(), 120)
        return Response(status_code=204)

    async def note() -> Response:
        shown.set()
        return Response(status_code=204)

    with serving(tiny_path, engine={"speculative": PLAN}) as server:
        app = server.server.config.app
        assert isinstance(app, FastAPI)
        app.add_api_route("/driven", lambda: HTMLResponse(driven))
        app.add_api_route("/held", held)
        app.add_api_route("/shown", note)
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"{server.url}/driven"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=240)
        body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 40}
        answer = server.http.post("/v1/chat/completions", json={**body, "tiers": True}).json()
        server.settle()
    found = Spans(made.stdout)
    assert found.texts["model"] == "tiny" and not found.texts.get("error", "").strip()
    wanted = [(piece["tier"], piece["text"]) for piece in answer["choices"][0]["tiers"] if piece["text"]]
    assert {tier for tier, _ in wanted} == {"draft", "check", "verify"}
    assert [piece for piece in found.pieces if piece[1]] == wanted
    numbers = re.fullmatch(
        r"40 tokens(?:, [\d.]+ tokens/s after the first)?; (\d+) % drafted and accepted, (\d+) % by the check"
        r" tier, (\d+) % by the full model",
        found.texts["numbers"],
    )
    assert numbers is not None and 99 <= sum(map(int, numbers.groups())) <= 101


def test_text_stands_out_in_light_and_dark() -> None:
    page = (files("hispec.serving") / "page.html").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", page)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        assert len(colours) == 6
        for name in ("text", "draft", "check", "verify", "error"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name


def contrast(one: str, other: str) -> float:
    """Of two colours (#rrggbb), as WCAG 2 defines it: 1 to 21; 4.5 is what it asks of text."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
