"""The engine itself: it puts the other rooms together. Each line may import what stands below it.

engine         `Engine`: puts cache, runtime, scheduler and threads together
serving        what engines share: submit, cancel, hand back, shut down
open_requests  each request from its submission to its end; the threads that prepare it
loading        loads and warms up an engine's model
statistics     the facts of its model; its counters and gauges
"""

from petiole.gpu_worker.engine.engine import Engine

__all__ = ["Engine"]
