"""Models: from a checkpoint to a decoder that runs a plan. Called by `runtime`; `text` reads configurations.

A model is data: a plan says what each layer computes, names say where the checkpoint keeps the layer's parts.
Models import nothing from the runtime, which passes attention, kernels and adapters in. Each line may import what
stands below it.

    fast_paths     what code that computes layers itself is asked: which layers of a plan it computes
    families/      config.json as a plan, a file a family. A new family begins here
    moondream/     what Moondream 2 has beside its plan: encoder, coordinates and sizes, skills
    vision/        towers, and decoders that see
    adapters/      small changes to the weights, chosen by each request
    loading        walks a plan and its names, and reads the weights
    decoder        runs a plan; what a decoder of images or of values has beside it. An encoder implements
                   that
    parts/         what a layer is made of: attention, feed-forward, norms, rotation. A new activation goes
                   here
    weights/       how linear layers are stored, named and read. A new way to store them goes here
    checkpoint/    a checkpoint's files: finding, formats, tensors
    plan           a model as data. What no plan can say yet is a new field here
    petiole_tiny/  the small model that ships; in `tools` the one that calls tools, in `embed` that of
                   vectors, in `vision` the one that sees
"""
