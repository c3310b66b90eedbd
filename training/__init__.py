"""How `petiole-tiny` is made: the text it learns, its tokenizer, its training and its measurement.

vision/    `petiole-tiny-vision`, from nothing
tools/     `petiole-tiny-tools`, from `petiole-tiny`
embed/     `petiole-tiny-embed`, from nothing
evaluate   `python -m training.evaluate`  held-out figures into the model card
drafts     `python -m training.drafts`    a head that drafts, into the folder
card       the model card
export     `python -m training.export`    checkpoint to a Hugging Face folder
train      `python -m training.train`     from nothing to a checkpoint, resumable
decode     greedy decoding of many questions
optimizer  Muon and AdamW
model      a lean Qwen3 for training; transformers gives the same logits
text/      prompts and their one right answer, as tokens
"""
