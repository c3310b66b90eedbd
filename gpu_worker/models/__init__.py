"""Models: reading a checkpoint, and computing a layer. Called by `runtime`; `text` reads configurations.

They import nothing of the runtime: attention, kernels and what adapters add are given to them.

    registry       which loader an architecture has; a family with a decoder of its own begins here
    config         a checkpoint's config.json as the decoder's parameters. A family that the decoder can
                   compute is a row of FAMILIES here
    loading        finds a checkpoint, in a folder or on the hub; its weights onto the device
    formats        checkpoints in formats that are not read, named as what they are
    safetensors    checkpoint files, mapped into memory
    host_memory    large tensors on the host, in large pages
    decoder        the decoder of Llama, Mistral, Qwen2 and Qwen3
    layers         linear layers for each weight format, and the element-wise kernels
    rotary         the table of rotary embeddings
    lora           adapters in PEFT's format, and the device's slots for them
    adapters       adapters in the host's memory
    moondream/     Moondream 2: encoder, decoder, coordinates and sizes
    petiole_tiny/  the small model that ships
    petiole_tiny_vision/  the small vision model that ships
"""
