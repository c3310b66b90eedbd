"""Tools and reasoning: what it costs to divide a text into its parts, to compile tools to a grammar, and to
enforce a call, token by token. All times are processor times.

The parser's peer is `json.loads` of the same deltas, one by one: what a reader does with each of them anyway. An
enforced call's peer is a schema of the same object: the name and the arguments.

    python -m bench.engine.tools [--quick] [--json PATH]
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from bench.harness.report import Report, arguments
from petiole.gpu_worker.constraints import compile_constraint
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.text import Tokenizer, load_tokenizer
from petiole.tasks.templates.formats import FAMILIES
from petiole.tasks.templates.parser import Parser
from petiole.tasks.templates.writing import WRITINGS, composed

TARGET_DELTA_US, TARGET_COMPILE_MS, TARGET_RATIO = 10.0, 50.0, 1.1
CHARACTERS = 4  # of a delta with one token
TEXTS = {
    "hermes": '<tool_call>\n{"name": "tool_1", "arguments": GIVEN}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=tool_1>\n<parameter=field_1>\nGIVEN\n</parameter>\n</function>\n"
    "</tool_call>",
    "harmony": "<|channel|>commentary to=functions.tool_1 <|constrain|>json<|message|>GIVEN",
}
SAID = "First I think about the question, and then I look for what was asked. "


def tools(number: int, fields: int) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}]
    return [
        {
            "name": f"tool_{n}",
            "parameters": {
                "type": "object",
                "properties": {f"field_{n}_{k}": kinds[k % 3] for k in range(fields)},
                "required": [f"field_{n}_{k}" for k in range(fields)],
                "additionalProperties": False,
            },
        }
        for n in range(number)
    ]


def arguments_of(tool: dict[str, Any]) -> dict[str, Any]:
    values = ["some text of a field", 12345, "a"]
    return {name: values[k % 3] for k, name in enumerate(tool["parameters"]["properties"])}


def measure_parser(report: Report, *, quick: bool) -> None:
    [tool] = tools(1, 10)
    given, types = json.dumps(arguments_of(tool)), {"tool_1": {"field_1": "string"}}
    for name, call in TEXTS.items():
        text = (SAID + call.replace("GIVEN", given) + "\n") * (1 if quick else 20)
        deltas = [text[at : at + CHARACTERS] for at in range(0, len(text), CHARACTERS)]
        written = [json.dumps({"index": k, "text": one}) for k, one in enumerate(deltas)]
        template = FAMILIES[name].template

        def divide() -> None:
            parser = Parser(template, tools=types)  # noqa: B023 - called at once
            for delta in deltas:  # noqa: B023
                parser.push(delta)
            parser.finish()

        def load() -> None:
            for one in written:  # noqa: B023
                json.loads(one)

        best = [float("inf")] * 2
        for _ in range(1 if quick else 25):
            for side, way in enumerate((divide, load)):
                began = time.process_time()
                way()
                best[side] = min(best[side], time.process_time() - began)
        ours, peer = (1e6 * seconds / len(deltas) for seconds in best)
        report.add(f"{name}: a delta is divided", ours, "us", target=TARGET_DELTA_US, better="lower")
        report.add(f"{name}: the same, beside reading it", ours, "us", peer=peer, better="lower")


def measure_grammar(report: Report, tokenizer: Tokenizer, *, quick: bool) -> None:
    [warm] = tools(1, 1)
    compile_constraint(calls([warm]), tokenizer)  # the vocabulary
    took, again = list[float](), list[float]()
    for k in range(1 if quick else 7):
        asked = calls([{**one, "name": f"{one['name']}_{k}"} for one in tools(10, 10 + k)])
        for found in (took, again):
            began = time.process_time()
            compile_constraint(asked, tokenizer)
            found.append(1e3 * (time.process_time() - began))
    name = "ten tools of ten fields are compiled"
    report.add(name, min(took), "ms", target=TARGET_COMPILE_MS, better="lower", samples=took)
    report.add("the same tools again", min(again), "ms", better="lower", samples=again)


def calls(given: list[dict[str, Any]]) -> Constraint:
    return Constraint("calls", composed(WRITINGS["hermes"], given, least=1, most=1, answer=None))


def measure_tokens(report: Report, tokenizer: Tokenizer, *, quick: bool) -> None:
    """Masks of single sequences, in turns."""
    [tool] = tools(1, 10)
    inside = json.dumps({"name": tool["name"], "arguments": arguments_of(tool)})
    around = f"<tool_call>\n{inside}\n</tool_call>"
    properties = {"name": {"const": tool["name"]}, "arguments": tool["parameters"]}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    sides = [
        (compile_constraint(calls([tool]), tokenizer), tokenizer.encode(around, add_special_tokens=False)),
        (
            compile_constraint(Constraint("json_schema", schema), tokenizer),
            tokenizer.encode(inside, add_special_tokens=False),
        ),
    ]

    def us_a_token(side: int) -> float:
        state, ids = sides[side]
        return min(1e6 * walk(state.fork(), ids) / len(ids) for _ in range(5))

    us_a_token(0), us_a_token(1)  # the automata are built
    name = "a token of an enforced call: mask and step"
    report.compare(
        name,
        "us",
        lambda: us_a_token(0),
        lambda: us_a_token(1),
        rounds=2 if quick else 31,
        target=None if quick else TARGET_RATIO,
        better="lower",
        note="peer: a schema of the same object",
    )


def walk(state: ConstraintState, ids: list[int]) -> float:
    """Processor seconds that the masks of this output and its tokens take."""
    words = np.zeros(16, np.int32)
    began = time.process_time()
    for token in ids:
        state.fill_mask(words)
        assert state.consume(token)
    return time.process_time() - began


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    report = Report("Tools and reasoning")
    tokenizer = load_tokenizer(resolve_model("petiole-tiny"))
    measure_parser(report, quick=options.quick)
    measure_grammar(report, tokenizer, quick=options.quick)
    measure_tokens(report, tokenizer, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
