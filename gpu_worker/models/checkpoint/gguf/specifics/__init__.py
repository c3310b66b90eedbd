"""What config.json has of each architecture beside what all have, from a GGUF file's metadata. Called by `config`.

table     by the architecture's name
encoders  of texts
hybrids   most layers keep a state
mixtures  with experts
decoders  the others
gemma     Gemma's
shared    what several read
"""
