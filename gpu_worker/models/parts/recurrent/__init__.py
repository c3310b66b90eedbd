"""Mixers that keep a state (`plan.Recurrent`). Each line may import what stands below it.

mixing        any of them, in one step
mamba2        a scan after a convolution, with a gate
short         a convolution between two gates
states        where states are, and which positions a step adds to which
delta_inputs  the weights of a delta net, and what its projections give the delta rule
delta_rule    the rule: position by position, or in chunks
scan          the scan of Mamba-2: position by position, or in chunks
"""
