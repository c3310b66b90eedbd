"""GGUF, llama.cpp's format: one file with metadata, a tokenizer and tensors. It is read as if it were a folder in
Hugging Face format, so families make its plans, and the readers of `weights` its weights.

choosing        which file is meant, and its pieces
tensors         its tensors, under the names of Hugging Face
config          its metadata, as config.json
specifics/      what config.json has of one architecture
metadata        keys of the metadata, checked
tensor_mapping  architectures, names of tensors, orders of rows
blocks          from blocks of quantised tensors to codes, scales and offsets
grids           the types whose codes are rows of a grid; its data lie beside it
fields          how blocks pack small numbers
header          metadata and the table of tensors, from bytes
block_types     types of tensors
"""
