"""How weights lie in memory. C only.

pack    how weights come there
blocks  from blocks of GGUF files to codes and scales
codes   the codes of weights with scales by group, and what the codes stand for
matrix  a map, and a thread's memory for its products
"""
