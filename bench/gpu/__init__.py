"""On a CUDA device.

__main__     `python -m bench.gpu`
calls        `python -m bench.gpu.calls`: what to run on a card that is lent for a quarter of an hour
steps        decode and prefill against their floors; the parts of `bench.gpu`
serving      a part: many sequences at once, beside other servers
vision       parts: questions about pictures
attention    a part: the attention of a decode step alone
layers       a part: the layers of a small batch without their attention
rules        a part: the delta rule of a layer alone
codes        a part: products with codes, and the launches of a mixture
humming      a peer of its products in four bits
host         the host's time for a step; also on a pretended card
wheelhouse/  what a machine without internet needs beside torch
card         the card, its rates, and a model of random weights on it
"""
