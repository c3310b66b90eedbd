"""Pages: who owns each, and which row maps it. Called by `allocation` and `prefix`.

row_table   rows of texts that are computed whole: without pages
page_table  the KV positions of each row
page_pool   the owner of each page, and the free ones
amounts     pages of one pool, or of each of several
"""
