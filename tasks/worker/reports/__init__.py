"""What a worker says of itself. Started by `boot`; `generation` counts into the tally.

reporter   the thread that writes this worker's report, and which figures of `Engine.stats` it takes (`_SAME`)
incidents  what befell this process, counted: deaths, lost leases, redeliveries
tally      histograms of waits, times and tokens, for Prometheus
heartbeat  the file whose time says that the engine makes progress
"""
