"""What all benchmarks share.

runs          one run of a benchmark that drives engines: its size, its device, its report
parts         a benchmark in parts, each in a process of its own
floors        the least time that the hardware needs
load          requests at a fixed concurrency or as a Poisson process, and the times of their deltas
report        samples become ratios, a table and a JSON file
plots         the pictures of the record
driver        a minimal scheduler over the `Runtime` protocol, for tests, too
stand_ins     runtimes that compute nothing, or only keep time
writer        streams as a worker writes them, without a worker
checkpoints/  models of random weights
"""
