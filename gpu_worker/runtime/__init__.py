"""Launching steps on a device. Engine and scheduler call `runtime` by the protocol in `interface`.

Each line may import what stands below it.

    runtime    `ModelRuntime`: a decoder, its KV pool and its sampler
    reading    finding a model, and reading its weights, after a reload into the same memory
    cpu/       the CPU's forward: native code, or torch
    cuda/      CUDA's forward: graphs, attention, fused kernels
    derived    settings that follow from configuration, model and device
    step/      what a step reads, and what is sampled from it
    memory/    the KV pool, and whether all of it fits
    device/    streams, events, transfers and slots
    interface  what the scheduler passes to a runtime, and what it gets back
"""
