"""The house: maps that are complete, folders that are not crowded, and no circle of imports anywhere.

import-linter checks the floors (see pyproject.toml). This is what it does not see: a circle through an `__init__`,
which runs whenever a room of its folder is imported, and what the maps say.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.parsing import parsed

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("gateway", "tasks", "gpu_worker", "cache")
BESIDE = ("bench", "training")
"""Folders that no wheel has, and that obey the same rules."""

MOST_ROOMS = 12
MOST_FILES_OF_ONE_NAME = 2
MOST_NAMES_OF_TWO_CLASSES = 30
"""Public ones, kombu's own (Channel, Transport), and models whose dictionaries have their names."""


def modules() -> dict[str, Path]:
    found = {f"petiole.{path.stem}": path for path in (ROOT / "petiole").glob("*.py")}
    found["petiole"] = found.pop("petiole.__init__")
    for floor in (*FLOORS, "petiole/contract", "petiole/engines", "petiole/testing"):
        for path in (ROOT / floor).rglob("*.py"):
            found[named("petiole", *path.relative_to(ROOT).parts)] = path
    for folder in BESIDE:
        found |= {named(*path.relative_to(ROOT).parts): path for path in (ROOT / folder).rglob("*.py")}
    return found


def named(*parts: str) -> str:
    """The module of a file: petiole once, and no `__init__`."""
    parts = parts[parts[:2] == ("petiole", "petiole") :]
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


MODULES = modules()
C_FILES = sorted(path for kind in ("c", "h") for floor in FLOORS for path in (ROOT / floor).rglob(f"*.{kind}"))
FOLDERS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py" and name != "petiole")
PRODUCT = [name for name in FOLDERS if name.startswith("petiole.")]


def imported(name: str) -> Iterator[str]:
    """The modules that a module imports anywhere in its code, those under TYPE_CHECKING and in functions, too."""
    for node in ast.walk(parsed(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports from a relative name"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in MODULES:
                    yield module
                elif node.module in MODULES:
                    assert re.search(rf"\b{alias.name}\b", MODULES[node.module].read_text()), (
                        f"{name}: no {module}"
                    )
                    yield str(node.module)


def ancestors(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def graph() -> dict[str, set[str]]:
    """What runs when a module is imported: what it imports, and the `__init__` of each folder on the way there. A
    folder's `__init__` has begun before the rooms in it, so it is not a step on their way to each other."""
    edges = defaultdict(set)
    for name in MODULES:
        own = {name, *ancestors(name)}
        for target in imported(name):
            edges[name] |= {target, *ancestors(target)} - own if target not in own else set()
    edges["petiole"] = set()  # its names are imported at their first use
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


def test_a_circle_is_found() -> None:
    assert circles(defaultdict(set, {"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c"]]


def test_there_is_no_circle_even_through_an_init() -> None:
    assert circles(graph()) == []


def included(path: Path) -> Iterator[Path]:
    """The files of ours that a file of C includes."""
    for name in re.findall(r'^ *# *include "(.*)"', path.read_text(), re.MULTILINE):
        yield (path.parent / name).resolve()


def c_graph() -> dict[str, set[str]]:
    """From each room of C to those that it includes. A source and its header are one room."""
    edges = defaultdict(set)
    for path in C_FILES:
        room = str(path.with_suffix(""))
        edges[room] |= {str(target.with_suffix("")) for target in included(path)} - {room}
    return edges


def folders_of(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same from folder to folder."""
    folders = defaultdict(set)
    for room, targets in edges.items():
        own = str(Path(room).parent)
        folders[own] |= {str(Path(target).parent) for target in targets} - {own}
    return folders


def test_there_is_no_circle_in_c() -> None:
    edges = c_graph()
    assert any(edges.values())
    assert all(target in edges for targets in edges.values() for target in targets)
    assert circles(edges) == []
    assert circles(folders_of(edges)) == []


def defined(text: str) -> set[str]:
    """The functions that a file of C defines; several variants of one, for processors, are one."""
    return set(re.findall(r"^(?!#|typedef)\w[\w *]*?\b(\w+)\([^;{}]*\)\s*\{", text, re.MULTILINE))


def test_a_function_of_c_is_found() -> None:
    text = "INLINE vp a(vp x) { return x; }\nstatic void b(int m,\n  int n) {\n  c(m);\n}\nint d(int m);\n"
    assert defined(text) == {"a", "b"}


def test_no_two_functions_of_c_have_one_name() -> None:
    """A source and its header are one room, which may have one variant in each."""
    found = {(name, path.with_suffix("")) for path in C_FILES for name in defined(path.read_text())}
    names = Counter(name for name, _ in found)
    assert len(names) > 200
    assert [name for name, count in names.items() if count > 1] == []


def rooms(folder: str) -> set[str]:
    """The modules and folders in a folder, those of C too. Files that are no code have no line of their own, and
    neither have families of models, which are all of one kind: a table in the docs lists them."""
    path = MODULES[folder].parent
    code = (file for kind in ("py", "c", "h") for file in path.glob(f"*.{kind}"))
    files = {file.stem for file in code if "\nFAMILIES = " not in file.read_text()} - {"__init__"}
    kept = (file for file in path.glob("*/*") if file.suffix and file.parent.name != "__pycache__")
    return files | {f"{file.parent.name}/" for file in kept}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_opens_with_a_map_of_its_rooms(folder: str) -> None:
    docstring = ast.get_docstring(parsed(MODULES[folder].read_text())) or ""
    mapped = re.findall(r"^ *([a-z0-9_]+/?)  +\S", docstring, re.MULTILINE)
    assert sorted(mapped) == sorted(rooms(folder))


@pytest.mark.parametrize("folder", ["support", "e2e"])
def test_a_folder_of_tests_that_mirrors_none_opens_with_a_map_too(folder: str) -> None:
    path = ROOT / "tests" / folder
    mapped = re.findall(r"^ *([a-z0-9_]+)  +\S", (path / "__init__.py").read_text(), re.MULTILINE)
    files = {file.stem for file in path.glob("*.py")} - {"__init__", "conftest"}
    assert sorted(mapped) == sorted(files)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_as_many_rooms_as_one_takes_in(folder: str) -> None:
    assert len(rooms(folder)) <= MOST_ROOMS


def test_no_file_name_stands_for_more_than_two_files() -> None:
    product = (path for name, path in MODULES.items() if name.startswith("petiole."))
    names = Counter(path.name for path in product if path.name != "__init__.py")
    assert {name: count for name, count in names.items() if count > MOST_FILES_OF_ONE_NAME} == {}


def test_hardly_a_class_name_stands_for_two_classes() -> None:
    product = [path for name, path in MODULES.items() if name.startswith("petiole.")]
    nodes = (node for path in product for node in ast.walk(parsed(path.read_text())))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert len(names) > 800
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= MOST_NAMES_OF_TWO_CLASSES, twice


def test_one_familys_values_are_known_to_its_folder_and_to_the_cache_that_names_them() -> None:
    """The engine knows kinds of values (`gpu_worker.request.values`), whatever they stand for."""
    words = re.compile(r"coordinate|CoordToken|SizeToken", re.IGNORECASE)
    petiole = {name: path for name, path in MODULES.items() if name.startswith("petiole.")}
    known = {name for name, path in petiole.items() if words.search(path.read_text())}
    own = {name for name in known if name.startswith("petiole.gpu_worker.models.moondream")}
    assert known - own == {"petiole.cache", "petiole.cache.tokens", "petiole.gpu_worker.models"}


def test_the_tests_mirror_the_folders() -> None:
    folders = {name.removeprefix("petiole.").replace(".", "/") for name in FOLDERS}
    mirrored = [
        path for floor in (*FLOORS, *BESIDE) for path in (ROOT / "tests" / floor).rglob("*") if path.is_dir()
    ]
    names = {str(path.relative_to(ROOT / "tests")) for path in mirrored if path.name != "__pycache__"}
    assert names <= folders


def test_contributing_shows_the_same_house() -> None:
    """CONTRIBUTING.md has a tree with a line about each folder."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = page.partition("```\npetiole/")[2].partition("```")[0]
    path: list[str] = []
    shown = set()
    for line in tree.splitlines()[1:]:
        match = re.match(r"^( *)([a-z_]+)/ ", line)
        if match:
            depth = len(match[1]) // 2 - 1
            path[depth:] = [match[2]]
            shown.add(".".join(("petiole", *path)))
    assert shown == set(PRODUCT)
