"""Families of models, one file each: from config.json to a plan, and where the checkpoint keeps the plan's parts.
A family computes nothing. A new one is a new file in one of the folders: the registry finds every module that has
`FAMILIES`. `moondream`, of text and images, is beside the folders.

registry       the supported architectures
decoders/      decoders whose layers all attend; siblings with experts are in the same file
mixtures/      decoders that exist only with experts
layer_normed/  decoders whose norms take the mean away: GPT-2, OPT, Command R
hybrids/       decoders of which most layers keep a state
encoders/      encoders of texts
family         what a family is; `read` is for one that is more than a decoder of text
texts          what pools the hidden states of a model of texts, and how it is asked
towers         `vision_config`: what encodes pictures
config_keys    keys of config.json that families share: sizes, rotations, windows, limits
"""
