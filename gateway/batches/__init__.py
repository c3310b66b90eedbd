"""OpenAI's files and batches, over `tasks.submission.batches`.

Files lie in a folder or bucket that all gateways and workers see. A batch is the object of `petiole batch
--detach`: workers run it, and a gateway holds nothing of it.

Each line may import what stands below it.

jobs          batches: made, shown, cancelled
files         files, in the storage and beside it in Redis; `list.lua` keeps a tenant's in order
quotas        how many files and open batches a tenant may have
file_storage  where the storage is, and whether all share it
lines         OpenAI's batch lines, as a form of `petiole batch`
kinds         by its endpoint, what a line's body becomes, and its answer
"""
