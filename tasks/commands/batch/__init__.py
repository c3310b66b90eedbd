"""`petiole batch`. Each line may import what stands below it.

command   the options; the rows of a file with a bar, until all have ended or Ctrl-C
estimate  `--dry-run`: what a batch would cost, from a sample
durable   `--detach`, and list, show, cancel, resume of such batches; a worker's runner
"""
