"""The inputs of a step and its sampling, on any device. Called by `runtime` and the executors.

inputs        the arrays of a step, laid out on the host
segments      the inputs of a step, grouped by the keys that they see
rows          sampling state of each row: parameters on the host, sent with each step; penalty counts, bias and
              next inputs on the device
pending       the next inputs of rows, which only the device knows
sampler       from logits to token ids and the host's outputs
sampling      the arithmetic of sampling, as pure functions
verify        which drafts are accepted
in_doubt      steps of rows whose drafts were being verified when the host planned
token_values  from numbers to inputs, and from hidden states to numbers
noise         noise of a seed and a position
terms         what adapters add, in plain torch
"""
