"""Compiles FlashInfer's kernels ahead, for a machine that should not spend its first minutes on compiling.

`bench.gpu.wheelhouse` runs this module with FlashInfer, and the two packages that FlashInfer needs to compile, on
its path. Any build of torch will do, and no GPU is needed:

    python -m bench.gpu.wheelhouse.kernels FOLDER --arch 9.0a --head-dim 64 --head-dim 128 [--adopt aot.tar.xz]

FOLDER then holds NAME/NAME.so for each module that Petiole calls, as FlashInfer looks for them in `data/aot`.
Modules that do not compile here (FlashInfer's norms need the headers of cuBLAS) are named, and left to the target
machine."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EQUAL_STRIDES = "_kv_stride_equal"
"""Ends the name of a prefill module for caches whose keys and values have equal strides, as ours have. The module
without this ending has the same functions and kernels, and more for other strides."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="9.0a", help="as in FLASHINFER_CUDA_ARCH_LIST")
    parser.add_argument("--head-dim", type=int, action="append", default=[])
    parser.add_argument("--adopt", type=Path, help="an archive of modules that were compiled before")
    options = parser.parse_args(argv)
    prepare(options.folder, options.arch)
    adopted = unpacked(options.adopt) if options.adopt else {}
    missing = []
    for spec in wanted(options.head_dim or [64, 128]):
        began = time.monotonic()
        try:
            how = take(spec, adopted, options.folder / spec.name / f"{spec.name}.so")
        except RuntimeError as error:
            missing.append(spec.name)
            how = f"not compiled: {reason(str(error))}"
        print(f"{spec.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if missing else 0


def prepare(folder: Path, arch: str) -> None:
    """Set, before FlashInfer is imported, where and for which card it compiles; and a driver to link, if there is
    none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libcuda.a").write_bytes(
        b"!<arch>\n"
    )  # an empty archive: the target machine has the driver's symbols
    home = cuda_home()
    os.environ |= {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(folder.resolve()),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder.resolve()}",
        **({"CUDA_HOME": str(home)} if home else {}),
    }


def cuda_home() -> Path | None:
    """The folder with nvcc and its headers."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).parent.parent, "/usr/local/cuda"]
    homes = [Path(place) for place in places if place]
    return next((home for home in homes if (home / "include" / "cuda_runtime.h").exists()), None)


def wanted(head_dims: list[int]) -> Iterator[Any]:
    """The modules that a bfloat16 model without sliding windows calls, also with keys in eight bits; see
    `runtime.cuda.attention.flashinfer`."""
    import torch
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.attention import modules
    from flashinfer.jit.norm import gen_norm_module

    for width, stored in itertools.product(head_dims, (torch.bfloat16, torch.float8_e4m3fn)):
        shape = (torch.bfloat16, stored, torch.bfloat16, torch.int32, width, width, 0, False, False)
        yield modules.gen_batch_decode_module(*shape)
        yield modules._gen_batch_prefill_primary_module("fa2", *shape, False)
    yield modules.gen_batch_mla_module("fa2", *[torch.bfloat16] * 3, torch.int32, 512, 64, False)
    yield gen_act_and_mul_module("silu")
    yield gen_norm_module()


def take(spec: Any, adopted: Mapping[str, bytes], target: Path) -> str:
    """Put the module in its place. Returns where it came from. Raises RuntimeError."""
    target.parent.mkdir(exist_ok=True)
    for name in (spec.name, spec.name.removesuffix(EQUAL_STRIDES)):
        if name in adopted:
            target.write_bytes(adopted[name])
            return "adopted"
    spec.build()
    shutil.copy(spec.jit_library_path, target)
    return "compiled"


def unpacked(archive: Path) -> dict[str, bytes]:
    """Modules by name."""
    with tarfile.open(archive) as tar:
        files = [(member, tar.extractfile(member)) for member in tar if member.name.endswith(".so")]
        return {Path(member.name).stem: file.read() for member, file in files if file}


def reason(output: str) -> str:
    return next((line.strip() for line in output.splitlines() if "error" in line), output.strip()[:200])


if __name__ == "__main__":
    sys.exit(main())
