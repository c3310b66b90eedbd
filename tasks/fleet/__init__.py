"""Watching and steering a fleet of workers, from any process that reaches its Redis.

control       a task's state, cancel; pause, resume, reload, drain: for applications, readers, the command line and
              workers
diagnosis     what is wrong with the fleet: for `petiole doctor`
exporter      `petiole metrics`: reports and queue lengths for Prometheus
markers       whether a process looks for results where workers store them: for a submission, callers that wait and
              the command line
restarts      starts and last exits of workers: workers write them, the command line and the exporter read them
loaded_adapters  adapters that were loaded over HTTP: the gateway writes them
models        what the models take, and which queue serves a name: workers write it, `petiole models` and
              submissions read it
probes        checks whether each Redis takes writes: for the command line and the exporter
usage         the ledger, read: for `petiole usage`, the gateway and the exporter
queues        queue lengths by priority: for the exporter, and for a worker's broker
quarantined   messages that were put aside: list them, send them again
story         the story of one task, for `petiole task`
availability  who serves a queue: for callers that wait, and for a submission that requires a worker
reports       workers' reports, field by field. A new figure begins here; `boot.step` fills it in, the command line
              shows it, `exporter` exports it
"""
