"""How `petiole-tiny-embed` is made: an encoder trained from nothing on generated pairs of texts.

concepts   phrases that mean the same, and what helps with what        (no torch)
pairs      questions and passages, rewordings, from a seed             (no torch)
tokenizer  pieces of words, counted in generated text
train      `python -m training.embed.train`     from nothing to the model folder
evaluate   `python -m training.embed.evaluate`  held-out figures into the model card
card       the model card
"""
