"""Builds the docs as a site: `make docs`, which installs what this needs, or `python -m docs.site`.

The pages are Markdown that a forge shows, too. So they are staged first: a link that leaves `docs/` becomes the
address of that file in the repository, and where nobody gives this address (`--repository URL`), plain text. The
page of the Python names is written from what `petiole` exports; its text comes from docstrings, without an import.

    docs/*.md, zensical.toml  ->  build/docs/ (staged)  ->  site/

Its search is `search.js`, which takes the place of the tool's own. The site loads nothing from elsewhere: no font,
no script, no count of visitors.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from docs.address import project, urls

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
CONFIG = DOCS / "zensical.toml"
INDEX = "README.md"
BRANCH = "main"

LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)


def kinds() -> dict[str, list[str]]:
    """By section of the site, its pages, as the configuration names them."""
    found: dict[str, list[str]] = {}
    for entry in tomllib.loads(CONFIG.read_text())["project"]["nav"]:
        for title, pages in entry.items():
            found[title] = (
                [pages] if isinstance(pages, str) else [path for page in pages for path in page.values()]
            )
    return found


# ---------------------------------------------------------------- staging


def stage(into: Path, repository: str) -> None:
    shutil.rmtree(into, ignore_errors=True)
    (into / "docs").mkdir(parents=True)
    for page in DOCS.glob("*.md"):
        name = "index.md" if page.name == INDEX else page.name
        (into / "docs" / name).write_text(staged(page.read_text(), repository))
    shutil.copytree(DOCS / "images", into / "docs" / "images")
    shutil.copytree(DOCS / "theme", into / "docs", dirs_exist_ok=True)
    (into / "docs" / "api.md").write_text(api())
    (into / CONFIG.name).write_text(configuration(repository))


def configuration(repository: str) -> str:
    """The configuration, with the version that the pages are about, and with the repository where it is known."""
    facts = [f'site_name = "Petiole {project()["version"]}"']
    if repository:
        facts.append(f'repo_url = "{repository}"')
    return CONFIG.read_text().replace("[project]\n", "\n".join(["[project]", *facts, ""]), 1)


def staged(text: str, repository: str) -> str:
    parts = FENCE.split(text)
    return "".join(
        part if n % 2 else LINK.sub(lambda m: link(m, repository), part) for n, part in enumerate(parts)
    )


def link(found: re.Match[str], repository: str) -> str:
    image, shown, target = found.groups()
    if target.startswith("../"):
        return f"{image}[{shown}]({repository}/blob/{BRANCH}/{target[3:]})" if repository else shown
    if target == INDEX or target.startswith(f"{INDEX}#"):
        target = target.replace(INDEX, "index.md")
    return f"{image}[{shown}]({target})"


# ---------------------------------------------------------------- the Python names


def exported() -> list[tuple[str, str]]:
    """Each name that `petiole.tasks` exports, with the module that has it."""
    tree = ast.parse((ROOT / "tasks" / "__init__.py").read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    return sorted(
        (alias.asname or alias.name, f"{node.module}.{alias.name}")
        for block in guarded
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("petiole.")
        for alias in node.names
    )


GROUPS = (
    ("Tasks", lambda home: ".submission." in home and home.rpartition(".")[2].islower()),
    ("Streams", lambda home: ".streams." in home),
    ("Errors", lambda home: ".errors." in home),
    ("Results and other types", lambda home: True),
)


def api() -> str:
    left = exported()
    lines = ["# Python\n", "What `from petiole import ...` offers, from the docstrings.\n"]
    for title, belongs in GROUPS:
        chosen = [one for one in left if belongs(one[1])]
        left = [one for one in left if one not in chosen]
        lines += [f"## {title}\n", *(f"::: {home}\n" for _, home in chosen)]
    return "\n".join(lines)


# ---------------------------------------------------------------- the site


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m docs.site", description="Build the docs as a site, into ./site."
    )
    parser.add_argument(
        "--repository",
        default=urls().get("Repository", ""),
        metavar="URL",
        help="where the links that leave docs/ lead",
    )
    parser.add_argument("--zensical", default="zensical", metavar="PATH", help="the program that builds the site")
    parser.add_argument("--mermaid", metavar="FILE", help="mermaid.min.js, which draws the diagrams")
    options: Any = parser.parse_args(argv)
    build = ROOT / "build"
    stage(build, options.repository.rstrip("/"))
    if options.mermaid:
        shutil.copy(options.mermaid, build / "docs" / "mermaid.min.js")
    done = subprocess.run([options.zensical, "build", "--clean", "--strict", "-f", str(build / CONFIG.name)])
    if done.returncode:
        return done.returncode
    [search] = (build / "site/assets/javascripts/workers").glob("search.*.js")
    shutil.copy(DOCS / "search.js", search)
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.move(build / "site", ROOT / "site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
