"""The memory for KV on the device, and whether everything fits. Called by `runtime` and the executors.

kv_tier      what KV is kept in files, and which sequences wait for it
chunk_files  the files, which a machine's workers share; their names by content
copies       copies of keys and values to the host, and back
features     what images have become, kept on a budget of their own
states       the states of layers that keep one
kv           the paged KV pool and the device's page table
room         whether rows, adapters and pages fit, before any are allocated
container    what this process may take: the limits of its control groups, and free memory
"""
