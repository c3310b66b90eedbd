"""A grammar in Lark's notation becomes a regular expression, if no name of it needs itself."""

from __future__ import annotations

import json
import re

import pytest
from llguidance import LLMatcher

from petiole.gateway.core.foreign import lark, text_tools
from petiole.gpu_worker.constraints.schema.patterns import single_bytes

CODEX = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch"
MOVED = "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ f\n-x\n+y\n \n*** End of File\n*** End Patch\n"
SUMS = """
    // sums of products
    ?start: product (SP ADD SP product)* -> sum
          | "none"
    product.2: NUMBER ~ 1..2
    SP: " "  # a space
    ADD: "+"
    %import common (INT, SIGNED_INT)
    %import common.INT -> NUMBER
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (CODEX, [ADDED, MOVED], [ADDED[:-1], "*** Begin Patch\n*** End Patch", ADDED.replace("+x", "x")]),
        (SUMS, ["1", "12 + 3", "none"], ["1+2", "1 +", "n"]),
        ('start: ["-"] A\nA: "a".."c"+ | /[.\\/]{2}/', ["-abc", "a", "./"], ["d", ".", "--a"]),
        ('start: "a.b\\n" | "(" [X "|"] ")"\nX: "["', ["a.b\n", "()", "([|)"], ["a_b\n", "([)"]),
    ],
)
def test_the_expression_matches_what_the_grammar_does(grammar: str, good: list[str], bad: list[str]) -> None:
    found = lark.expression(grammar)
    assert found is not None
    assert [text for text in good if not re.fullmatch(found, text)] == []
    assert [text for text in bad if re.fullmatch(found, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "", "start:", "begin: /a/", "start: b", "start: /a/ start | /b/", 'start: "(" start? ")"',
        "start: a\na: b\nb: a", 'start: "a"i', "start: /a/i", "start: /(?=a)/", "start: /^a$/", r"start: /\bx/",
        r"start: /(a)\1/", "start: /a+?/", "start: /[[a]]/", "start: /[a&&b]/", "start: /a{/", "start: /(/",
        "start: /+a/", "start: /a**/", "start: /)(/", 'start: "a" ~ 9999', 'start: "ab".."c"', 'start: "\\q"',
        "start: /a/\n%ignore WS", "start: WS\n%import common.NOWHERE", "start: a{b}\na{x}: x", "start: (",
        "start: " + "(" * 2000 + ")" * 2000, "start: /" + "a" * lark.MOST_TOLD + "/",
        "\n".join(f"s{k}: s{k + 1} s{k + 1}" for k in range(40)) + "\ns40: /a/\nstart: s0",
        "start: " + "|".join("b" * 2000) + "\nb: " + "c " * 8 + "\nc: /" + "x" * 400 + "/",
        "start: /[][]/", "start: /[]/", "start: /[^]/", r'start: "\ud800"',
    ],
)  # fmt: skip
def test_another_grammar_has_none(grammar: str) -> None:
    assert lark.expression(grammar) is None


def test_the_engine_enforces_a_patch() -> None:
    made = text_tools.function("f", "apply_patch", {"format": {"syntax": "lark", "definition": CODEX}})
    assert "strict" not in made  # not every format has calls that can be enforced
    assert "hunk+" in made["description"]
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(made["parameters"]))
    for text, taken in ((ADDED, True), (MOVED, True), (ADDED.replace("+x", "x"), False)):
        matcher = LLMatcher(single_bytes(), grammar)
        said = json.dumps({"input": text}).encode()
        assert (matcher.try_consume_tokens([*said]) == len(said) and matcher.is_accepting()) == taken, text
