"""GGUF, llama.cpp's format: one file with metadata, a tokenizer and tensors. It is read as if it were a folder in
Hugging Face format, so families make its plans, and the readers of `weights` its weights.

tensors   its tensors, under the names of Hugging Face
config    its metadata, as config.json
names     architectures, names of tensors, orders of rows
blocks    from blocks of quantised tensors to codes, scales and zeros
header    metadata and the table of tensors, from bytes
types     types of tensors
"""
