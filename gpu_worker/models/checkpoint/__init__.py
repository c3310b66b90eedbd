"""Reading a checkpoint.

loading      finds a checkpoint, in a folder or on the hub, and reads its weights onto the device
formats      recognises checkpoints in formats that are not read, and refuses them by name
safetensors  checkpoint files, mapped into memory
"""
