"""Reading a checkpoint's files.

finding                finds a checkpoint, in a folder or on the hub
identity               opens it, and identifies it by its content
opening                its configuration, whatever the files are
gguf/                  GGUF files, llama.cpp's
class_defaults         what config.json leaves out
named_tokens           tokens by their texts
configuration          its JSON files
sentence_transformers  the files beside it that say how texts are pooled
bge_m3                 the files beside it of what BGE-M3 makes of tokens
codes                  what four-bit codes stand for
safetensors            its tensors, mapped into memory
"""
