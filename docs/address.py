"""Where the project can be had: `[project.urls]` of pyproject.toml, as README, the tutorial and others say it.

`python -m docs.render` writes these lines between `<!-- name -->` and `<!-- /name -->`. An address that is not
there yet is left out, and the lines say what to do without it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "docs/tutorial.md", "docs/existing-app.md")]
CITATION = ROOT / "CITATION.cff"


def project() -> Mapping[str, object]:
    declared: Mapping[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return declared


def urls() -> Mapping[str, str]:
    """By name (Repository, Download, Security), the addresses that are known."""
    found = project().get("urls", {})
    assert isinstance(found, dict)
    return found


def blocks(known: Mapping[str, str], version: str) -> dict[str, str]:
    """By name, the lines that follow from the addresses."""
    clone = f"git clone {known['Repository']} petiole\ncd petiole\n" if "Repository" in known else ""
    where = "" if clone else "In a checkout:\n\n"
    if "Download" in known:
        install = (
            f"Releases, their checksums and a bill of materials: [{version}]({known['Download']}). Pin one by "
            f"`petiole=={version}`."
        )
    else:
        install = (
            f"{version} is on no package index yet: `make dist` in a checkout builds it. "
            f"After `export PIP_FIND_LINKS=/path/to/checkout/dist` each `pip install` finds it. "
            f"Pin `petiole=={version}`."
        )
    report = (
        f"at [{known['Security'].removeprefix('mailto:')}]({known['Security']})"
        if "Security" in known
        else "by *Security*, then *Report a vulnerability*, on the repository's page"
    )
    demo = "make demo      # no Redis, Docker or GPU needed: eight prompts at once through a real worker\n"
    return {
        "try": f"{where}```sh\n{clone}{demo}make test      # every kind of test\n```",
        "install": install,
        "report": f"Report a weakness in private, {report}. Please open no issue for it.",
    }


def page(text: str) -> str:
    for name, lines in blocks(urls(), str(project()["version"])).items():
        opening, closing = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        between = re.compile(f"(?<={opening}).*?(?={closing})", re.S)
        text = between.sub(lines.replace("\\", r"\\"), text)
    return text


def citation(text: str) -> str:
    kept = "".join(line for line in text.splitlines(True) if not line.startswith("repository-code:"))
    return kept + (f"repository-code: {urls()['Repository']}\n" if "Repository" in urls() else "")
