"""What the driver says of this worker's card: NVML's figures, with the extra `nvml`.

A figure that the card does not have is None. A fault of the driver costs the figures alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

FIGURES = ("card_memory_bytes", "card_power_w", "card_temperature_c", "card_ecc_errors", "card_xids")


class Card:
    """The card with this UUID, such as `GPU-...`. Raises ImportError without the extra, and NVML's error for a
    card that is not there."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._xids, self._events = 0, self._listen()

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`. Logs each Xid, which says what has gone wrong on the card."""
        nvml, card = self._nvml, self._handle
        return {
            "card_memory_bytes": self._asked(lambda: nvml.nvmlDeviceGetMemoryInfo(card).used),
            "card_power_w": self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            "card_temperature_c": self._asked(
                lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
            ),
            "card_ecc_errors": self._asked(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
            "card_xids": self._count_xids(),
        }

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            logger.debug("the card has no such figure: %s", error)
            return None

    def _listen(self) -> Any:
        """The set of events in which the driver puts Xids. None: the card tells none."""
        nvml = self._nvml

        def listen() -> Any:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events

        return self._asked(listen)

    def _count_xids(self) -> int | None:
        if self._events is None:
            return None
        while (event := self._asked(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))) is not None:
            self._xids += 1
            logger.error("the card reports Xid %d: NVIDIA's list of Xids says what it means", event.eventData)
        return self._xids


def find(device: str) -> Card | None:
    """The card of an engine that computes on `device`. None on a CPU, without the extra, and without NVML."""
    if not device.startswith("cuda"):
        return None
    try:
        import torch

        return Card(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
    except ImportError:
        return None
    except Exception as error:
        logger.warning("the card's own figures are missing: %s", error)
        return None
