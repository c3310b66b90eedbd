"""Products of rows with weights.

decode     the linear layers of small batches, with the norms and activations around them
grouped    products with codes, and with the layers of experts
codes      how codes become numbers
"""
