"""The memory for KV on the device, and whether everything fits. Called by `runtime` and the executors.

kv         the paged KV pool and the device's page table
room       whether rows and adapters fit, before any are allocated
container  the limits of this process's control groups
"""
