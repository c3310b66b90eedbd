"""The CUDA path without a GPU: `python -m tests.gpu.pretend [COMMAND ...]`, in the project's root.

Compiles the library beside this file, which stands in for CUDA's runtime, driver and cuBLAS (`pretend.h` says
what it does), and runs a command with it: by default `check.py`, which starts engines and lets them serve. What
runs are torch's CUDA build, FlashInfer's compiled modules and what Triton compiles; these and gcc are needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NEEDED = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC", "-pthread")


def main() -> int:
    environment = os.environ.copy()
    command = sys.argv[1:]
    if not command:
        command = [sys.executable, "-m", "tests.gpu.pretend.check"]
        environment.setdefault("PRETEND_MEMORY", str(2 << 30))
    with tempfile.TemporaryDirectory(prefix="petiole-pretend-") as folder:
        library = compiled(Path(folder))
        environment |= {"LD_PRELOAD": str(library), "TRITON_LIBCUDA_PATH": folder}
        return subprocess.run(command, env=environment).returncode


def compiled(folder: Path) -> Path:
    """The library under the driver's name, by which Triton looks for it."""
    library = folder / "libcuda.so.1"
    searched = [f"-isystem{place}" for place in headers()]
    sources = sorted(map(str, HERE.glob("*.c")))
    named = [f"-Wl,-soname,{library.name}", "-o", str(library)]
    if not shutil.which("gcc"):
        raise SystemExit("gcc is needed to compile the pretended card")
    if subprocess.run(["gcc", *FLAGS, *searched, *sources, *named]).returncode:
        raise SystemExit("the pretended card does not compile")
    return library


def headers() -> list[Path]:
    """The folders to search for CUDA's headers: those of torch's packages, of CUDA_HOME, of nvcc, and of Triton,
    which brings some that torch's packages lack."""
    folders = [found for place in sys.path for found in sorted(Path(place).glob("nvidia/cu*/include"))]
    if "CUDA_HOME" in os.environ:
        folders.append(Path(os.environ["CUDA_HOME"], "include"))
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parent.parent / "include")
    folders += [Path(place, "triton/backends/nvidia/include") for place in sys.path]
    for name in NEEDED:
        if not any((folder / name).exists() for folder in folders):
            raise SystemExit(f"CUDA's {name} is not found: install torch's CUDA build, or set CUDA_HOME")
    return folders


if __name__ == "__main__":
    raise SystemExit(main())
