"""Eyes beside a decoder of text: pictures as patches of any number, a tower of layers, and what it makes of them.
Each line may import what stands below it.

reading         from a checkpoint to a decoder with eyes
tower_weights   a tower's weights, and the names of its tensors
seeing          a decoder with eyes, of any family
tower           from pixels to the inputs of the decoder of text; what is learnt of patches' places
joining         the patches of a block as one position
frames          of videos: as pictures, with text between them; no torch
gemma_pictures  Gemma's pictures; no torch
row_pictures    Mistral's pictures; no torch
tile_pictures   pictures that are cut into tiles; no torch
pictures        from a picture's size to its layout, and from a picture to its pixels; no torch
dimensions      of a tower, with the plan of its layers
writing         what stands between the features of a picture; no torch
"""
