"""Adapters: small changes to a model's weights, chosen by each request.

files  which adapters requests may name, and the files of one
store  adapters in the host's memory
lora   reads PEFT's format, by the names in `weights/names`, and keeps the device's slots for adapters
"""
