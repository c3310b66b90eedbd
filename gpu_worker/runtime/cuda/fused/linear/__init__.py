"""Products of rows with weights.

decode     the linear layers of small batches, with the norms and activations around them
split_k    the same for up to 64 rows and for more families, with a kernel more between two products
dense      the product of a few rows with dense weights, which both launch
coded      the product of a few rows with codes of four and eight bits, which both launch
ends       what such a product does before its loop and after it
grouped    products of any number of rows with codes, and with the layers of experts
codes      how codes become numbers
"""
