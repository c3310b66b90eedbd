"""How weights lie in memory. C only.

pack    how weights come there
codes   the codes of weights with scales by group, and what the codes stand for
matrix  a map, and a thread's memory for its products
"""
