"""Watching and steering a fleet of workers, from any process that reaches its Redis.

control       a task's state, cancel; pause, resume, reload, drain: for applications, readers, the command line and
              workers
exporter      `petiole metrics`: reports and queue lengths for Prometheus
metrics       the metrics that `reports` declares, for the exporter; vLLM's and OpenTelemetry's names for some
repair/       what is wrong, and what to do: with the fleet, with a task, with messages that were put aside
restarts      starts and last exits of workers: workers write them, the command line and the exporter read them
loaded_adapters  adapters that were loaded over HTTP: the gateway writes them
models        what the models take, and which queue serves a name: workers write it, `petiole models` and
              submissions read it
usage         the ledger, read: for `petiole usage`, the gateway and the exporter
queues        queue lengths by priority: for the exporter, and for a worker's broker
availability  who serves a queue, and whether a process looks for results where workers store them: for callers
              that wait, a submission, and the command line
reports       workers' reports, field by field. A new figure begins here; `boot.step` fills it in, the command line
              shows it, `exporter` exports it
"""
