"""A batch as an object that outlives its client: its state in Redis, its journal in pages beside its output.

    open ──► a worker's host claims it, for a lease ──► a runner, a process of its own, runs `Batch` ──► ended
      ▲                                                             │
      └───────── the runner has died, or must stop: its lease ends ─┘

State is small, whatever the number of rows: what is to be done, how far it is, who has it. Rows and results are in
files alone. The foreground command is the same loop, with the client's process as its host and no lease.

Workers host runners, because rows go on only where there are workers, so a batch needs nobody else to be there. A
runner is no Celery task: that would take a place, wait behind the batch's own rows, and end with RabbitMQ's
`consumer_timeout`. It is a process of its own, so reading rows takes no time from the engine's thread.

Each line may import what stands below it.

submitting   for clients: begin a batch, wait until a worker has it
runner       runs a batch that this process has claimed
claims       which open batches this machine may run; claims them
current_row  which row a runner handles, for those who find it dead
watchdog     what ends a runner that nothing else ends
fair_share   with whom a batch shares the workers; also of a batch that its client's process runs
records      what stands in Redis
lua/         the scripts of `records`
"""
