"""How `petiole-tiny-vision` is made: the pictures it learns, its tokenizer, its training.

qwen/     the next one, in Qwen3-VL's form
losses    how wrong a model is about where something is
pictures  scenes of coloured shapes, drawn from a seed, and questions with their one right answer   (no torch)
tokens    one token a word of the questions and answers, one token a byte everywhere else          (no torch)
model     a Moondream made small, for training; its parameters have the published names
train     `python -m training.vision.train`   from nothing to a checkpoint, resumable
export    `python -m training.vision.export`  a checkpoint as a model folder
evaluate  `python -m training.vision.evaluate`  figures on held-out pictures, by the engine, and the model card
card      the model card
"""
