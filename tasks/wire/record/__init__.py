"""What stands in Redis of one task, for everybody who writes or reads it: a worker, a producer, a test.

No torch, no numpy, no hiredis. The fields are declared in `contract.results`, and the names of the keys in
`tasks.keys`.

codec    deltas and ends as JSON, derived from the declared fields; the log read back; a task's attempts, as
         `begin.lua` notes them
ledger   what each task has used, by tenant: the entry that is written with a task's end
scripts  loads the scripts of `lua/`, and of other rooms
lua/     begin: counts the attempt and the deaths before it; remodel: another model goes on; publish: appends for
         the attempt that owns the task; its last append finishes the stream, once; announces a prepared task;
         close: ends the stream of a refused message; prelude: stands before every script
"""
