"""Adapters: small changes to a model's weights, chosen by each request.

store  adapters in the host's memory
lora   reads PEFT's format, by the names in `weights/names`, and keeps the device's slots for adapters
"""
