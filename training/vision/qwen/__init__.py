"""The next `petiole-tiny-vision`, in Qwen3-VL's form. It takes the place of today's once it answers as well; then
the model, the tokens, the training and the export beside this folder go.

evaluate  `python -m training.vision.qwen.evaluate FOLDER`  figures on held-out pictures, by the engine
export    `python -m training.vision.qwen.export FOLDER`    a checkpoint as a model folder
train     `python -m training.vision.qwen.train`            from nothing to a checkpoint, resumable
batches   pictures with rows of questions
model     a Qwen3-VL made small, for training; its parameters have the published names
tokens    one token a word, a number, or a phrase of the questions; one token a byte everywhere else   (no torch)
"""
