"""Moondream 2: a vision encoder, a decoder of text with a bidirectional image prefix, coordinates and sizes.

config          its dimensions, tokens and templates
processor       pictures as crops, and skill calls and conversations as prompts; no torch
skills/         what it can be asked, a file a skill; no torch
crops           from a picture to uint8 crops; no torch
vision_encoder  from crops to the inputs of the text decoder
decoder         the text decoder
values          coordinates and sizes as kinds of values
region          coordinates and sizes: their weights
weights         the published names of its tensors
"""
