"""Reading a checkpoint's files.

finding        finds a checkpoint, in a folder or on the hub, and identifies it
opening        its configuration, whatever the files are
gguf/          GGUF files, llama.cpp's
configuration  its JSON files
formats        recognises checkpoints in formats that are not read, and refuses them by name
safetensors    its tensors, mapped into memory
"""
