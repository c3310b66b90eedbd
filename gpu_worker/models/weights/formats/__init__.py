"""Formats of quantised checkpoints, a reader each: from the tensors beside a layer's name to the form of
`weights.coded`. Called by `weights.reading`. A new format is a file here, and a line in `find`.

find                 which format a layer has
quantization_config  what config.json says
compressed_tensors   formats of llm-compressor: packed integers, int8, NVFP4, MXFP4
fp8                  eight-bit floats, of whoever wrote them
gptq                 GPTQ
awq                  AWQ
gguf                 blocks of GGUF files
modelopt             NVFP4 as ModelOpt writes it
layer_tensors        the tensors beside a name, and checks of them
reader               what a format is
unread               formats that are not read
packing              orders of codes
"""
