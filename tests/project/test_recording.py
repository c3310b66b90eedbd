"""The recording at the top of README shows a whole run: every answer, begun by one worker, ended by the other."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from docs import recording
from docs.recording import COLOURS, Heard, Run

SVG = "{http://www.w3.org/2000/svg}"


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def texts(svg: str, colour: str) -> str:
    return "".join(text.text or "" for text in elements(svg) if text.get("fill") == colour)


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def shown(svg: str) -> str:
    """The answers, letter by letter, where they stand in the picture."""
    found = [text for text in elements(svg) if text.get("fill") in COLOURS.values()]
    answers = [text for text in found if text.get("class") and not (text.text or "").startswith("goes on")]
    return "".join(text.text or "" for text in sorted(answers, key=lambda text: float(text.get("y") or 0)))


def test_the_recording_has_each_answer_once() -> None:
    svg = recording.RECORDING.read_text()
    assert re.sub(r"\s", "", shown(svg)) == re.sub(r"\s", "", "".join(recording.ANSWERS))
    assert all(len(numbers(texts(svg, colour))) > len(recording.ANSWERS) for colour in COLOURS.values())


def test_text_appears_when_its_reader_got_it() -> None:
    run = Run(1.0, [Heard(0.0, 0, 1, "a<b "), Heard(3.0, 0, 2, "c" * recording.COLUMNS)])
    svg = recording.svg(run)
    last = 100 * 3.0 * recording.SLOWER / (3.0 * recording.SLOWER + recording.STILL_S) + 0.5
    [name] = {text.get("class") for text in elements(svg) if "cc" in (text.text or "")}
    assert f"@keyframes {name}{{0%,{last:.2f}%{{opacity:0}}" in svg
    assert shown(svg) == "a<b " + "c" * recording.COLUMNS
