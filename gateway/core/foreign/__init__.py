"""What clients of other servers send. Pure.

unknown     parameters that are unknown: which are ignored, which are refused
spellings   what has another name here
text_tools  tools that take text: as functions, and back
lark        a grammar of such a tool as a regular expression
"""
