"""Groups of layers that keep less than everything: each has a pool beside the page table.

manager           `KVCacheManager` for such a model. Made by `gpu_worker`
table             the page table, and the pools of its groups
windows           a group of layers that see a window: what rows hold, give back and keep
recurrent_states  a group of layers that keep a state: snapshots, from which others go on
serving           from which positions a group can go on, and where a match ends
companions        a pool whose pages accompany those of the table
"""
