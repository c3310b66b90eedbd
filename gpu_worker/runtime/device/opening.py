"""Opens the device that the configuration names."""

from __future__ import annotations

from typing import Literal

from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.device.device import Device


def open_device(kind: Literal["auto", "cpu", "cuda"]) -> Device:
    """Open a device. "auto": CUDA if available, else the CPU. Raises MachineError if "cuda" is not available."""
    if kind == "cpu":
        return CpuDevice()
    import torch

    if torch.cuda.is_available():
        from petiole.gpu_worker.runtime.device.cuda import CudaDevice

        return CudaDevice()
    if kind == "cuda":
        why = "sees no GPU" if torch.version.cuda else "was built without CUDA"
        raise MachineError(f"the device must be cuda, but torch {torch.__version__} {why}")
    return CpuDevice()
