"""Benchmarks that anyone can repeat: ratios against a peer or a floor measured in the same run.

share       `petiole bench share`: records that users send in
__main__    `petiole bench [WORKLOAD ...]`, and where each workload lies
render      tables of the record and of the docs, from recorded figures
gpu/        on a CUDA device
models/     models on the CPU, beside other engines
engine/     the engine driven directly; whether a worker around a fast device keeps up
queue/      through Celery and Redis
gateway/    over HTTP
scheduler/  the scheduler and the caches without tensors; fleets on paper
peers/      the programs that Petiole is compared with
harness/    what all of these share: reports, loads, floors, models of random weights
results/    the record
"""
