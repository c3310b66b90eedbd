"""The sums of a panel of outputs. C only.

panels       of 32 outputs, or of 64
tiles        the same on AMX's tiles
groups       of weights with scales by group, of inputs in bfloat16
group_tiles  the same on tiles
floats       the same of inputs that are floats, or were rounded
slices       how `groups` and `floats` compute a panel
"""
