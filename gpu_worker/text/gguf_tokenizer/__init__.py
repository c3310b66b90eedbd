"""The tokenizer of a GGUF file. Called by `tokenizer_files`.

reading  from the file's metadata to a tokenizer
cuts     how text is cut into words, by name
"""
