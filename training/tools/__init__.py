"""How `petiole-tiny-tools` is made: `petiole-tiny`, trained further on conversations in which it calls tools.

conversations  questions, the calls that they need, and the answers from the results  (no torch)
template       its chat template, and the same in Python                              (no torch)
train          `python -m training.tools.train`     from petiole-tiny's folder to a checkpoint
export         `python -m training.tools.export`    checkpoint to a Hugging Face folder
evaluate       `python -m training.tools.evaluate`  held-out figures into the model card
card           the model card
"""
