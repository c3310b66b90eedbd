"""Products of rows with weights.

decode     the linear layers of small batches, with the norms and activations around them
ends       what such a product does before its loop and after it
grouped    products with codes, and with the layers of experts
codes      how codes become numbers
"""
