"""A worker's reports on itself. Started by `boot`; `generation` counts into the tally.

reporter    the thread that writes this worker's report, with figures from `Engine.stats`
host        this process's memory, and its clock beside Redis's
disks       how full the disks of its folders are
card        the card's own figures, from its driver
incidents   counts of incidents in this process: deaths, lost leases, redeliveries
histograms  histograms of waits, times and tokens, for Prometheus
marker      a result of no task, by which others see whether they look for results where this worker stores them
inspection  commands about a model: what it needs, what it can, a timeline of its steps
facts       what the model takes, and its names, for producers
heartbeat   the file whose modification time shows that the engine makes progress
"""
