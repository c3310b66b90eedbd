"""The compiled CPU path is optional: what stops it from being built stops nothing else."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from petiole.gpu_worker.runtime.cpu.native import build
from petiole.gpu_worker.runtime.cpu.native.build import Level, fitting

load = build.load_library.__wrapped__  # each test asks anew


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    """With a library of one function: the kernels would take seconds in every test."""
    (source := tmp_path / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(build, "_SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_without_a_compiler_torch_takes_its_place_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_complaint(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "broken-cc" in caplog.text
    assert "no such flag" in caplog.text
    assert not list(tmp_path.glob("petiole/*.so"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_built_once_and_kept(monkeypatch, empty_cache, caplog):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    with caplog.at_level(logging.INFO):
        assert load() is not None
        (built,) = (empty_cache / "petiole").glob("*.so")
        before = built.stat().st_mtime_ns
        assert load() is not None
    assert built.stat().st_mtime_ns == before
    for said in ("compiling the CPU kernels, once on this machine", "compiled the CPU kernels for this machine"):
        assert caplog.text.count(said) == 1


@pytest.fixture(params=["no home", "one where no folder can be made"])
def nowhere_to_write(request, monkeypatch, tmp_path):
    """Gives what stands for /tmp."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    if request.param == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    else:
        (tmp_path / "home").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "tmp"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_a_home_to_write_to_it_is_kept_in_a_private_temporary_folder(monkeypatch, nowhere_to_write):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    assert load() is not None
    (folder,) = nowhere_to_write.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.glob("*.so"))) == 1


def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(nowhere_to_write, caplog):
    folder = nowhere_to_write / f"petiole-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "may be written by others (mode 777)" in caplog.text


@pytest.fixture
def planted(monkeypatch, empty_cache):
    """A library in the cache, where the next look expects it, and what stands for /tmp."""
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    (empty_cache / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(empty_cache / "tmp"))
    assert load() is not None
    (library,) = (empty_cache / "petiole").glob("*.so")
    return library


def writable_by_others(library, monkeypatch):
    library.chmod(0o777)


def in_a_folder_that_others_may_write_to(library, monkeypatch):
    library.parent.chmod(0o770)


def a_link(library, monkeypatch):
    library.symlink_to(library.rename(library.with_suffix(".moved")))


def anothers(library, monkeypatch):
    theirs, lstat = library.stat(), Path.lstat

    def owned(path):
        found = lstat(path)
        return os.stat_result([*found[:4], 12345, *found[5:]]) if found.st_ino == theirs.st_ino else found

    monkeypatch.setattr(Path, "lstat", owned)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (writable_by_others, "may be written by others (mode 777)"),
        (in_a_folder_that_others_may_write_to, "may be written by others (mode 770)"),
        (a_link, "is a link"),
        (anothers, "belongs to user 12345"),
    ],
)
def test_a_library_that_somebody_else_can_have_written_is_not_loaded(planted, spoil, reason, monkeypatch, caplog):
    spoil(planted, monkeypatch)
    with caplog.at_level(logging.WARNING):
        library = load()
    assert reason in caplog.text
    assert library._name == str(Path(tempfile.gettempdir()) / f"petiole-kernels-{os.getuid()}" / planted.name)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_it_builds_is_trusted_under_any_umask(monkeypatch, empty_cache, caplog):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    before = os.umask(0)
    try:
        assert [load()._name, load()._name] == [str(next((empty_cache / "petiole").glob("*.so")))] * 2
    finally:
        os.umask(before)
    assert caplog.messages == ["compiling the CPU kernels, once on this machine"]


class Linux:
    """Answers a process that asks for tiles."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, 0

    def syscall(self, *_: object) -> int:
        self.calls += 1
        return self.answer


@pytest.mark.skipif(sys.platform != "linux", reason="permission is Linux's to give")
@pytest.mark.parametrize(
    ("flags", "answer", "may", "asked"),
    [
        ("flags : avx512f amx_bf16 amx_tile", 0, True, 1),
        ("flags : avx512f amx_bf16 amx_tile", -1, False, 1),
        ("flags : avx512f", 0, False, 0),
    ],
    ids=["permitted", "refused", "no tiles"],
)
def test_linux_is_asked_for_the_tiles_of_a_processor(flags, answer, may, asked, monkeypatch, caplog):
    linux = Linux(answer)
    monkeypatch.delenv("PETIOLE_TILES", raising=False)
    monkeypatch.setattr(build, "_processor", lambda: flags)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda _: linux)
    with caplog.at_level(logging.WARNING):
        assert build._may_use_tiles() is may
    assert linux.calls == asked
    assert ("does not permit AMX" in caplog.text) is (asked > 0 and not may)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_permission_for_tiles_it_is_compiled_without_them(monkeypatch, empty_cache):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    commands = []
    compiled = build._compile
    monkeypatch.setattr(build, "_compile", lambda command, *to: (commands.append(command), compiled(command, *to)))
    for switch in ("on", "off"):
        monkeypatch.setenv("PETIOLE_TILES", switch)
        assert load() is not None
    assert [build._WITHOUT_TILES in command for command in commands][-1]
    assert len(list((empty_cache / "petiole").glob("*.so"))) == len(commands)


@pytest.fixture
def quick(monkeypatch):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_a_library_that_is_not_whole_is_compiled_again(share, quick, empty_cache, caplog):
    """As after a power cut, or on a full disk. To load half of it would end the process."""
    folder = empty_cache / "petiole"
    folder.mkdir(mode=0o700)
    command = build._command(["cc"])
    target = folder / f"native-{build._key(command)}.so"
    build._built(target, command)
    whole = target.read_bytes()
    target.write_bytes(whole[: int(share * len(whole))])
    assert load() is not None
    assert target.read_bytes() == whole
    assert "is not whole" in caplog.text


def test_of_those_that_begin_together_one_compiles(quick, monkeypatch, tmp_path):
    compiler = tmp_path / "cc-that-counts"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/compiled\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(4) as threads:
        libraries = [library._name for library in threads.map(lambda _: load(), range(4))]
    assert len(set(libraries)) == 1
    assert (tmp_path / "compiled").read_text() == "\n" * (len(build._SOURCES) + 1)  # and links them


def test_a_compiler_may_have_arguments(quick, monkeypatch):
    monkeypatch.setenv("CC", "cc -DANY_OTHER")
    assert load() is not None


def test_where_one_folder_is_full_the_other_one_is_used(quick, monkeypatch, tmp_path):
    compiler = tmp_path / "cc-with-a-full-disk"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{tmp_path}/petiole/*) echo full >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("CC", str(compiler))
    assert load() is not None
    assert list((tmp_path / "tmp").glob("petiole-kernels-*/*.so"))


V3 = "flags : fpu abm avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"
AMX = f"{V4} avx512_bf16 avx512_vnni avx512vbmi amx_bf16 amx_int8 amx_tile"


@pytest.mark.parametrize(
    ("machine", "processor", "tiles", "names"),
    [
        ("x86_64", "flags : fpu sse2 avx", True, []),
        ("x86_64", V3, True, ["avx2"]),
        ("x86_64", V3.replace("fma", "fmax"), True, []),
        ("x86_64", f"{V4} avx512_bf16", True, ["avx512", "avx2"]),
        ("x86_64", AMX, True, ["amx", "avx512-bf16", "avx512", "avx2"]),
        ("x86_64", AMX, False, ["avx512-bf16", "avx512", "avx2"]),
        ("aarch64", "Features : fp asimd", False, ["armv8"]),
        ("riscv64", "riscv64", False, []),
    ],
)
def test_a_processor_gets_the_levels_that_it_has_the_best_first(machine, processor, tiles, names):
    assert [level.name for level in fitting(machine, processor, tiles=tiles)] == names


def instructions_for(*flags: str) -> set[str]:
    """The macros that a compiler defines for these flags, but for that of a processor without any of them."""
    if not (compiler := build._compiler()):
        pytest.skip("no C compiler")
    command = [*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {*re.findall(r"^#define (__\w+__) 1$", text, re.MULTILINE)} - {"__k8__"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other names")
def test_linux_and_the_compiler_agree_which_levels_this_processor_has():
    """Linux does not name all instructions as compilers do: avx512_vbmi2, but avx512vbmi."""
    here = instructions_for(build._THIS_PROCESSOR)
    has = [level.name for level in build.LEVELS["x86_64"] if instructions_for(*level.flags) <= here]
    assert [level.name for level in fitting("x86_64", build._processor(), tiles=True)] == has


@pytest.fixture
def ahead(quick, monkeypatch, tmp_path):
    """A folder with the library of a level that any processor has, and a machine without a compiler."""
    level = Level("any", ("-DANY",), frozenset())
    monkeypatch.setattr(build, "LEVELS", {platform.machine(): (level,)})
    monkeypatch.setattr(build, "LEVELS", {platform.machine(): (level,)})
    (made,) = build.make_ahead(tmp_path / "ahead")
    monkeypatch.setattr(build, "_AHEAD", made.parent)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return made


def test_what_an_image_brings_is_loaded_without_a_compiler(ahead, caplog):
    with caplog.at_level(logging.INFO):
        assert load()._name == str(ahead)
    assert "compiled ahead for any" in caplog.text


def half(library, monkeypatch):
    library.write_bytes(library.read_bytes()[:1000])


def of_other_sources(library, monkeypatch):
    library.rename(library.with_name("any-0123456789abcdef.so"))


@pytest.mark.parametrize("spoil", [writable_by_others, a_link, anothers, half, of_other_sources])
def test_what_an_image_brings_is_checked_like_what_was_compiled_here(ahead, spoil, monkeypatch, caplog):
    spoil(ahead, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "no C compiler" in caplog.text


@pytest.mark.parametrize(
    ("half", "permitted", "name"),
    [(True, True, "amx"), (True, False, "avx512-bf16"), (False, True, "avx512-bf16")],
)
def test_amx_is_named_only_where_products_are_made_on_tiles(half, permitted, name, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_processor", lambda: AMX)
    monkeypatch.setattr(build, "_may_use_tiles", lambda: permitted)
    assert build.instructions.__wrapped__(half=half) == name
