"""Traces: OpenTelemetry's, of one task from its submission to its last reader.

What travels needs no package: two headers of a task's message. Spans need the extra `otel`, and a provider that
the application has set, or that `exporting` makes in a process of Petiole's own. For a process without a provider
Petiole does not import OpenTelemetry; redis-py does where it is installed.

carried    the headers: of what is submitted here, and of what runs
spans      the spans of producers, readers and the gateway; a worker's are in `worker.delivery.attempt_spans`
exporting  a provider for workers, gateways and runners, from the standard variables
light      that provider: its spans cost little
encoding   spans in the collector's form
"""
