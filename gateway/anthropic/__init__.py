"""Anthropic's interface: another view of the same core. Agents such as Claude Code speak it.

request     the request of a message: a plan
view        its answer, streamed and whole
model_list  the models of the fleet as Anthropic lists them
blocks      messages as clients write them, in blocks, as a task takes them
tools       tools as clients write them, and as a task takes them
answers     usage, stop reasons, errors
"""
