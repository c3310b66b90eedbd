"""The layers of a model: a step from inputs to logits, in one call. Called by `stack`.

forward     the order of all parts
between     what lies between two maps
shares      a step's sequences among the threads, where the caches hold the weights
latents     attention over latents: what stands around it
experts     mixtures of experts: who computes what, and the weighted sums
plans       what is computed of a step, in what order, in which memory
rows        norms, rotation and storage of one position
structures  a plan's layers and weights as structures of C
model       a model and a step: structures of C, and the same in Python
"""
