"""How `petiole-tiny-vision` is made: the pictures it learns, its tokenizer, its training. It has Qwen3-VL's form.

evaluate  `python -m training.vision.evaluate FOLDER`  figures on held-out pictures, and the model card
card      the model card
export    `python -m training.vision.export FOLDER`    a checkpoint as a model folder
train     `python -m training.vision.train`            from nothing to a checkpoint, resumable
batches   pictures with rows of questions
model     a Qwen3-VL made small, for training; its parameters have the published names
tokens    one token a word, a number, or a phrase of the questions; one token a byte everywhere else   (no torch)
losses    how wrong a model is about where something is
pictures  scenes of coloured shapes, drawn from a seed, and questions with their one right answer      (no torch)
"""
