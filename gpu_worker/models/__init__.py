"""Models: reading a checkpoint, and computing a layer. Called by `runtime`; `text` reads configurations.

Models import nothing from the runtime, which passes attention, kernels and adapters in.

    registry       which loader an architecture has; a family with a decoder of its own begins here
    config         a checkpoint's config.json as the decoder's parameters. A family that the decoder can
                   compute is a row of FAMILIES here
    checkpoint/    reading a checkpoint: files, formats, weights
    host_memory    large tensors on the host, in large pages
    decoder        the decoder of Llama, Mistral, Qwen2 and Qwen3
    known          the decoders that fast paths may compute; they refuse all others
    layered        decoders and encoders, as code that computes their layers itself sees them
    layers         linear layers for each weight format, and the element-wise kernels
    rotary         the table of rotary embeddings
    adapters/      small changes to the weights, chosen by each request
    moondream/     Moondream 2: encoder, decoder, coordinates and sizes
    petiole_tiny/  the small model that ships
    petiole_tiny_vision/  the small vision model that ships
"""
