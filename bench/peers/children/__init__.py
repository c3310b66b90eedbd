"""Peers with packages of their own, each in a process under another Python.

outside          engines: a load at once
texts            vectors of texts
outside_child    the process of `outside`; it imports nothing of this project
texts_child      the process of `texts`; it imports nothing of this project
llama_cpp_child  the process of `peers.llama_cpp`; it imports nothing of this project
child            a process that answers each line with a line
"""
