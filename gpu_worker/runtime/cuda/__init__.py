"""CUDA's forward. Called by `building` and `runtime`.

platform     what a CUDA device decides and makes for a runtime
simulated    a card that is not here, for `sizing`
executor     a captured graph for steps up to some size, one eager pass for all others
whole_texts  models whose texts are computed whole
shapes       which steps are captured
graphs       steps as CUDA graphs
capture      makes a graph of the kernels that a task launches
recurrent    the states of a step's rows
attention/   paged attention
supported    the plans that CUDA computes
encoder      the image encoder as CUDA graphs
fused/       Triton kernels that FlashInfer lacks
"""
