"""`petiole ...` on the command line. Only `petiole.testing` imports these rooms: it starts the demo's worker.

cli           the arguments, and the short commands. A new one begins here
status        `petiole status`: workers (STATUS_COLUMNS, _status_row) and queues; `petiole doctor`,
              `petiole task`, `petiole replay`
models        `petiole models`: the models of the last days, and their names
plan          `petiole plan`: what a model needs, and what a machine serves of it
usage         `petiole usage`: what each tenant has used
control       `petiole pause`, `resume`, `reload` and `drain`
batch/        `petiole batch`: the rows of a file through the fleet
conversation  `petiole chat`: a conversation in the terminal
terminal      tables, live views and errors, with or without rich
gateway       `petiole serve`; `petiole up`, `petiole demo --http`: the gateway in front of workers of its own
keys          `petiole keys`: make, list and revoke the keys of the gateway
demos/        `petiole demo`, and a worker with an embedded Redis for whoever starts one
"""
