"""The text that `petiole-tiny` learns.

data       batches of rows of tokens
tokenizer  one token a word of the frame, one token a letter everywhere else
dialogue   how a prompt becomes text: chat template, or a plain prompt        (no torch)
skills     what the model can do: prompts and their one right answer          (no torch)
grammar    facts in fixed sentences, and what the model says about itself     (no torch)
words      what the skills are about, and made-up words                       (no torch)
"""
