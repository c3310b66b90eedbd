"""The CPU's forward. Called by `runtime`.

executor   chooses native code where it can be compiled, otherwise torch
attention  paged attention in plain torch: the reference for all others
native/    the compiled forward
"""
