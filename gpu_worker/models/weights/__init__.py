"""How the weights of linear layers are stored, behind one interface. A new format is a class and a way to read it.

reading  copies tensors from their source onto the device: whole, joined, or in eight bits
linear   `Linear`, and a class for each way to store its weights
names    where a checkpoint keeps the parts of a plan
"""
