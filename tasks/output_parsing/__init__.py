"""Parses a model's output into reasoning, content and tool calls: formats as data, and one parser.

The worker parses once, for the stored result. Readers of a stream and gateways parse its deltas. All get the same,
however the text was split. Pure: no tokenizer, no input, no output, and nothing but the standard library.

    message              a whole output as a message; ids of calls
    writing              how families write calls, for whoever enforces them
    formats              the formats of families of models, by name; which one a checkpoint has
    parser               the parser: text in, events out
    template             a template, checked and compiled
    tool_calls           parses what stands between the marks of a call: JSON, or Python's calls
    tagged_tool_calls    the same for calls with a tag around each argument
    unmarked_tool_calls  a message that is a call without marks
    types                which values the parameters of a tool may have
    json_values          one JSON value, read as it comes; arguments by their types
    marks                where the next mark of a text is
    patterns             a subset of regular expressions, as automata
"""
