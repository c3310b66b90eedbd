"""Families of models, one file each: from config.json to a plan, and where the checkpoint keeps the plan's parts.
A family computes nothing. A new one is a new file here: the registry finds every module that has `FAMILIES`.

registry   the supported architectures
family     what a family is; `read` is for one that is more than a decoder of text
texts      what pools the hidden states of a model of texts, and how it is asked
reading    keys of config.json that families share: sizes, rotations, windows, limits
"""
