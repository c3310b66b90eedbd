"""Makes a Celery worker Petiole's. Called by Celery, when a worker starts.

configure      all changes to Celery's configuration
patches        what is replaced in Celery and kombu, and which of their private names are relied on: one list
log_redaction  keeps users' text out of the log: exceptions without their messages, figures in place of answers
program        the program's exit, its connections' URLs, and its log
bootstep       the bootstep between pool and consumer: starts leases, reports (and fills them in), heartbeat
batch_runners  starts runners of batches, processes beside the worker
"""
