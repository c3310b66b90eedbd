"""Compiles the C files beside and below this module for the processor, once, and keeps the library in the user's
cache. Without a home folder to write to, it keeps the library in the folder for temporary files.

A library is code, so it is loaded only if nobody else can have written it: file and folder belong to this user or
to root, and neither group nor others may write to them. If a library fails this check, the log names it, and it is
built in the other folder.

An image has no compiler. `python -m petiole.gpu_worker.runtime.cpu.native.build`, run when an image is made,
compiles the files ahead for each of the `levels` into a folder beside this module. Where this folder has a library
for the processor, that library is loaded and nothing is compiled.

There is nothing to install. With a C compiler on the machine the CPU path is several times faster; without one the
torch path computes the same. `PETIOLE_NATIVE=off` chooses the torch path.

A processor with AMX multiplies on tiles. A process may use them only after Linux has permitted it. Where a
hypervisor or an old kernel prevents that, and with `PETIOLE_TILES=off`, the library is compiled without them.

Compilers may round a product and its sum once (`-ffp-contract`), and choose loop by loop. Here they may not: the
loops for one row and for many must make the same sums. Where one rounding saves time, the source asks for it
(`add_times`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from petiole.contract.settings.engine import switch

# ------------------------------------------------------------ levels of processors
#
# A machine with a compiler compiles for its own processor. An image is made on one machine and runs on others,
# without a compiler: it brings one library for each level, and a worker loads the best that its processor has.


@dataclass(frozen=True)
class Level:
    """Instructions that a library uses."""

    name: str
    flags: tuple[str, ...]
    """For gcc or clang, in the place of `-march=native`."""
    needs: frozenset[str]
    """The names of these instructions in /proc/cpuinfo."""
    tiles: bool = False
    """Whether a process needs Linux's permission for them."""


_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")

LEVELS = {
    "x86_64": (
        Level("amx", (*_BF16_FLAGS, *_AMX_FLAGS), _BF16 | {"amx_bf16", "amx_int8", "amx_tile"}, tiles=True),
        Level("avx512-bf16", _BF16_FLAGS, _BF16),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("armv8", ("-march=armv8-a",), frozenset()),),
}
"""By machine, the best first."""


def fitting(machine: str, processor: str, *, tiles: bool) -> Iterator[Level]:
    """The levels that a processor has, the best first. `processor`: its line of /proc/cpuinfo."""
    has = frozenset(processor.split())
    return (level for level in LEVELS.get(machine, ()) if level.needs <= has and (tiles or not level.tiles))


log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(sorted(_FOLDER.rglob("*.c")))
_HEADERS = tuple(sorted(_FOLDER.rglob("*.h")))
_AHEAD = _FOLDER / "ahead"
_THIS_PROCESSOR = "-march=native"
_OWN_NAMES = ("-Wl,-Bsymbolic",) if sys.platform == "linux" else ()
"""The library calls its own functions, although the process may have others of the same names."""

_FLAGS = (
    *("-O3", _THIS_PROCESSOR, "-fopenmp", "-shared", "-fPIC", "-std=gnu11"),
    *("-fno-strict-aliasing", "-ffp-contract=off"),
    *_OWN_NAMES,
)
_WITHOUT_TILES = "-DNO_TILES"
_TIMEOUT_S = 300
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library; None if there is none for this processor, and no compiler or one that fails. This is
    logged once."""
    if (ahead := _made_ahead(_AHEAD)) is not None:
        return ahead
    compiler = _compiler()
    if not compiler:
        log.warning(
            "no C compiler found: the CPU path runs on torch alone, which is usually slower (install gcc or clang)"
        )
        return None
    command = _command(compiler)
    name = f"native-{_key(command)}.so"
    failures = []
    for folder in (_cache_folder, _private_folder):
        try:
            return ctypes.CDLL(str(_built(folder() / name, command)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, or a full disk, say
            if isinstance(error, _Untrusted):
                log.warning("CPU kernels that others may have written are not used: %s", error)
            failures.append(str(getattr(error, "stderr", None) or error))
    why = "; ".join(dict.fromkeys(" ".join(failure.split())[:500] for failure in failures))
    log.warning("there are no CPU kernels compiled by %s, so torch is used: %s", compiler[0], why)
    return None


@cache
def instructions(*, half: bool) -> str:
    """The best level of instructions that the kernels use on this processor, for a model in bfloat16 (half) or in
    another type; "" if it has none of the levels."""
    levels = fitting(platform.machine(), _processor(), tiles=half and _may_use_tiles())
    return next((level.name for level in levels), "")


def _compiler() -> Sequence[str]:
    return shlex.split(os.environ.get("CC", "")) or [c for c in ("cc", "gcc", "clang") if shutil.which(c)][:1]


def make_ahead(folder: Path) -> list[Path]:
    """Compile a library for each level of this architecture. Raises CalledProcessError if the compiler fails."""
    folder.mkdir(mode=0o755, exist_ok=True)
    made = []
    for level in LEVELS.get(platform.machine(), ()):
        made.append(folder / _name_ahead(level))
        _compile([*(_compiler() or ["cc"]), *_flags_ahead(level)], made[-1])
        made[-1].chmod(0o644)  # whoever builds an image is not the user that runs it
    return made


def _made_ahead(folder: Path) -> ctypes.CDLL | None:
    """The library of the best level that this processor has and that is in `folder`, if there is one."""
    if not folder.is_dir():
        return None
    for level in fitting(platform.machine(), _processor(), tiles=_may_use_tiles()):
        target = folder / _name_ahead(level)
        try:
            _check_writers(folder, stat.S_ISDIR)
            if _is_whole(target):
                library = ctypes.CDLL(str(target))
                log.info("CPU kernels: those compiled ahead for %s", level.name)
                return library
        except OSError as error:
            log.warning("CPU kernels that were compiled ahead are not used: %s", error)
    return None


def _flags_ahead(level: Level) -> Sequence[str]:
    return (*level.flags, *(flag for flag in _FLAGS if flag != _THIS_PROCESSOR))


def _name_ahead(level: Level) -> str:
    """Libraries of other sources have other names, so they are not found."""
    return f"{level.name}-{_digest(_flags_ahead(level))}.so"


def _command(compiler: Sequence[str]) -> Sequence[str]:
    return (*compiler, *_FLAGS) if _may_use_tiles() else (*compiler, *_FLAGS, _WITHOUT_TILES)


def _key(command: Sequence[str]) -> str:
    return _digest((tuple(command), _processor()))


def _digest(how: object) -> str:
    source = b"".join(file.read_bytes() for file in (*_SOURCES, *_HEADERS))
    return hashlib.sha256(source + repr(how).encode()).hexdigest()[:16]


def _may_use_tiles() -> bool:
    """Whether the processor has tiles that this process may use."""
    if switch("tiles") == "off" or " amx_bf16" not in _processor():
        return False
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    log.warning("Linux does not permit AMX on this machine: the CPU kernels multiply by vectors, which is slower")
    return False


class _Untrusted(PermissionError):  # noqa: N818
    """Somebody else can have written the library."""


def _built(target: Path, command: Sequence[str]) -> Path:
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    _check_writers(target.parent, stat.S_ISDIR)
    if not _is_whole(target):  # who finds it waits for nobody that compiles another one
        with _alone(target.parent):
            if not _is_whole(target):
                began = time.monotonic()
                log.warning("compiling the CPU kernels, once on this machine")
                _compile(command, target, _TIMEOUT_S)
                took = time.monotonic() - began
                log.info("%s compiled the CPU kernels for this machine in %.1f s", command[0], took)
    _check_writers(target, stat.S_ISREG)
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock: of workers that begin together one compiles, and the others wait for its library."""
    with (folder / "lock").open("ab") as file:
        with suppress(OSError):  # a file system without locks: each compiles
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: Sequence[str], target: Path, timeout_s: float | None = None) -> None:
    """As many files at a time as there are processors."""

    def run(*arguments: object) -> None:
        subprocess.run(
            [*command, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=timeout_s
        )

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        objects = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(lambda source, to: run("-c", source, "-o", to), _SOURCES, objects))
        run("-o", made, *objects, "-lm")
        _seal(made)
        made.replace(target)  # atomic: no worker finds a part of it


def _seal(made: Path) -> None:
    """Append the file's hash, which loaders ignore, and wait until all of it is on the disk."""
    made.chmod(0o700)
    with made.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(target: Path) -> bool:
    """Whether the library is there, all of it: loading a part of one would end the process."""
    if not os.path.lexists(target):
        return False
    _check_writers(target, stat.S_ISREG)
    content = target.read_bytes()
    size = hashlib.sha256().digest_size
    whole = hashlib.sha256(content[:-size]).digest() == content[-size:]
    if not whole:
        log.warning("%s is not whole: the CPU kernels are compiled again", target)
    return whole


def _check_writers(path: Path, is_kind: Callable[[int], bool]) -> None:
    """Check that nobody but this user and root can have written the file. Raises _Untrusted."""
    found = path.lstat()
    if not is_kind(found.st_mode):
        raise _Untrusted(f"{path} is a link or of another kind")
    if found.st_uid not in (os.getuid(), 0):
        raise _Untrusted(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & 0o022:
        raise _Untrusted(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "petiole"


def _private_folder() -> Path:
    """A folder in the folder for temporary files. The embedded Redis has another one, which its server removes."""
    return Path(tempfile.gettempdir()) / f"petiole-kernels-{os.getuid()}"


def _processor() -> str:
    """The properties of the processor on which -march=native depends."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


if __name__ == "__main__":
    for library in make_ahead(_AHEAD):
        print(library)
