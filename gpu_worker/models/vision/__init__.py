"""Eyes beside a decoder of text: pictures as patches of any number, a tower of layers, and what it makes of them.

config     a tower's dimensions, and its plan of layers, from config.json
pictures   from a picture's size to its layout, and from a picture to its pixels; no torch
tower      from pixels to the inputs of the decoder of text
decoder    a decoder with eyes, of any family
reading    the names of a tower's tensors
"""
