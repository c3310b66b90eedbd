"""Models of random weights, whose values do not change the speed.

qwen_vl         a Qwen3-VL of any size, in the published layout
moondream       a Moondream 2 of any size, in the published layout
encoders        encoders of texts, as files
decoders        shapes of decoders, what a step of each reads and computes, and their files
random_weights  weights that are made where they go, without a file
"""
