"""Many rows as many tasks: rows of a file or an iterable, results in a file, each row exactly once.

    rows ─ source ─► row ─ a form ─► calls ─ exchange ─► tasks ... results ─ a form ─► a line ─ journal ─► output

Only the journal, beside the output, says which rows have ended. A row's results are forgotten in Redis
after its line is on disk. The ids of a row's tasks follow from batch, row and content, so a row that is sent
twice is one task, and whoever dies at whatever instant leaves nothing that the same call cannot go on from.

Each line may import what stands below it.

api              `petiole.batch`: cheap to import
durable/         a batch that outlives its client: its state in Redis, its runner
batch            the loop: send, collect, write, forget; the output; whose process runs it
sending          which row is sent next; rows on their way, until they have ended
ended_rows       rows that have ended: their lines, their results until they are forgotten, the output
client           tasks and results in Redis, many in a round trip
in_flight        which rows are on their way, how many there may be, and which are lost: no input, no output
journal          what is written beside the output
segments         where a journal's lines are: in a file, or in pages
progress         what a batch says while it runs: a line, a bar, a mistake of all rows
rows/            rows of files, tables and iterables; the tasks that a row becomes; its result; formats of files
files/           files by their location, and which of them may be opened
"""
