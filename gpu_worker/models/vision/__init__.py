"""Eyes beside a decoder of text: pictures as patches of any number, a tower of layers, and what it makes of them.
Each line may import what stands below it.

reading     from a checkpoint to a decoder with eyes: the names of a tower's tensors
seeing      a decoder with eyes, of any family
tower       from pixels to the inputs of the decoder of text
pictures    from a picture's size to its layout, and from a picture to its pixels; no torch
dimensions  of a tower, with the plan of its layers
"""
