"""The memory for KV on the device, and whether everything fits. Called by `runtime` and the executors.

states     the states of layers that keep one
kv         the paged KV pool and the device's page table
copies     copies of keys and values to the host, and back
chunk_files  files with such copies, which a machine's workers share
room       whether rows, adapters and pages fit, before any are allocated
container  what this process may take: the limits of its control groups, and free memory
"""
