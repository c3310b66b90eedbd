"""How `petiole-tiny` is made: the text it learns, its tokenizer, its training and its measurement.

skills    what it can do: prompts and their one right answer, from a seed    (no torch)
dialogue  how a prompt becomes text: chat template, or a plain prompt        (no torch)
tokenizer one token a word of the frame, one token a letter everywhere else
model     a lean Qwen3 for training; transformers gives the same logits
train     `python -m training.train`     from nothing to a checkpoint, resumable
export    `python -m training.export`    checkpoint to a Hugging Face folder
evaluate  `python -m training.evaluate`  held-out figures into the model card
"""
