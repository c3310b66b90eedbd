"""Something that may fail for a while. The first failure and the recovery are logged, but nothing in between."""

from __future__ import annotations

import logging
import time


class Outage:
    """Consecutive failures of one thing. `failing` and `recovered` are the texts of log lines. `began` passes the
    arguments of `failing`. `recovered` also gets the length of the outage."""

    def __init__(
        self, logger: logging.Logger, failing: str, recovered: str, *, level: int = logging.ERROR
    ) -> None:
        self._logger, self._failing, self._recovered, self._level = logger, failing, recovered, level
        self._since: float | None = None

    @property
    def lasts_s(self) -> float:
        """Seconds since the first failure; 0 if the last try succeeded."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def lasts(self) -> bool:
        return self._since is not None

    def began(self, *arguments: object, unexpected: BaseException | None = None) -> None:
        """A try failed. The log line has a traceback if the failure is `unexpected`."""
        if self._since is None:
            self._since = time.monotonic()
            self._logger.log(self._level, self._failing, *arguments, exc_info=unexpected)

    def ended(self) -> None:
        """A try succeeded."""
        if self._since is not None:
            self._logger.warning("%s, after %.1f s", self._recovered, self.lasts_s)
            self._since = None
