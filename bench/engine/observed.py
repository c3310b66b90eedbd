"""An engine that watches the threads of its worker: `PETIOLE_ENGINE_FACTORY=bench.engine.observed:engine`.

It obeys the lines of a named pipe, `BENCH_PIPE`. `begin SECONDS` sets the interpreter's switch interval and starts
to count; `end PATH` writes the counts as JSON.

Python does not say how long a thread waits for the interpreter's lock. So a probe sleeps, again and again, and
notes how late it runs. Linux counts for how much of that time it waited for a core. During the rest it waited for
the lock, as the publisher and the completion threads do when they are woken."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine.profiling import cpu_seconds
from bench.harness.report import percentile
from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.runtime.device.tracing import Tracer

PROBE_S = 0.002


def engine(config: EngineConfig) -> Engine:
    """The usual engine, with a tracer, and watched from now on."""
    tracer = Tracer()
    watched = Engine(config, tracer=tracer)
    watch = Watch(tracer)
    watch.start()
    return watched


@dataclass
class Watch:
    """The seconds counted since `begin`; those of threads by their names."""

    tracer: Tracer
    began: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    queued_s: dict[str, float] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)

    def start(self) -> None:
        for work, name in ((self.obey, "bench-pipe"), (self.probe, "bench-probe")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def obey(self) -> None:
        while True:
            with Path(os.environ["BENCH_PIPE"]).open() as pipe:
                for line in pipe:
                    command, _, argument = line.strip().partition(" ")
                    if command == "begin":
                        self.begin(float(argument))
                    else:
                        self.write(self.end(), Path(argument))

    def begin(self, switch_interval_s: float) -> None:
        sys.setswitchinterval(switch_interval_s)
        self.tracer.reset()
        self.late_s = []
        self.cpu_s, self.queued_s = cpu_seconds(), queued_seconds()
        self.began = time.perf_counter()

    def end(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self.began
        late, cpu_s, queued_s = sorted(self.late_s), cpu_seconds(), queued_seconds()
        waited = sum(s["dur"] for s in self.tracer.spans() if s["line"] == "engine" and s["name"] == "wait") / 1e6
        return {
            "seconds": seconds,
            "cpu_s": {name: cost - self.cpu_s.get(name, 0.0) for name, cost in cpu_s.items()},
            "queued_s": {name: cost - self.queued_s.get(name, 0.0) for name, cost in queued_s.items()},
            "engine_waited_s": waited,
            "late_s": {"mean": sum(late) / max(1, len(late)), "99": percentile(late, 0.99)},
            "probes": len(late),
        }

    @staticmethod
    def write(seen: Mapping[str, Any], path: Path) -> None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(seen))
        beside.rename(path)

    def probe(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(PROBE_S)
            self.late_s.append(time.perf_counter() - began - PROBE_S)


def queued_seconds() -> dict[str, float]:
    """How long each Python thread has been ready to run while no core was free."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        try:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
        except OSError:
            continue
        seconds[thread.name] = seconds.get(thread.name, 0.0) + int(text.split()[1]) / 1e9
    return seconds
