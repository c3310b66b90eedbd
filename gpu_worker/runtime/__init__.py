"""Launching steps on a device. Engine and scheduler call `runtime` by the protocol in `interface`.

Each line may import what stands below it.

    runtime           `ModelRuntime`: launches steps
    sizing            what a model needs and a machine serves, before anything is allocated
    building          what is decided from configuration, model and memory; what steps use, take and return by name
    model_files       finding a model, and reading its weights, after a reload into the same memory
    derived_settings  settings that follow from configuration, model and platform
    cpu/              the CPU's forward: native code, or torch
    cuda/             CUDA's forward: graphs, attention, fused kernels
    platforms         what differs between the two: what fits, which types and kernels, the executor
    step/             what a step reads, and what is sampled from it
    memory/           the KV pool, and whether all of it fits
    device/           streams, events, transfers and slots
    interface         what the scheduler passes to a runtime, and what it gets back
"""
