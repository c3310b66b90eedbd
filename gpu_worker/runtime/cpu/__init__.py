"""The CPU's forward. Called by `building` and `runtime`.

platform   what a CPU decides and makes for a runtime
executor   chooses native code where it can be compiled, otherwise torch
attention  paged attention in plain torch: the reference for all others
native/    the compiled forward
head       the head that drafts, from draft to draft
"""
