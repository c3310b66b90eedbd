"""Pages: who owns each, and which row maps it. Called by `allocation` and `prefix`.

page_table  the KV positions of each row
page_pool   the owner of each page, and the free ones
amounts     pages of one pool, or of each of several
"""
