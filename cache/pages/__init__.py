"""Pages: who owns each, and which row maps it. Called by `allocation` and `prefix`.

page_table  the KV positions of each row
pool        the owner of each page, and the free ones
"""
