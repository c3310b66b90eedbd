"""Writes what follows from the declarations of options and results: `python -m docs.render`.

    petiole/contract/requests                declares each option of a task and of a submission, once
    petiole/contract/results/task_result.py  each field of a delta and of a result
    petiole/contract/settings                each setting of the engine and of the gateway, and the switches
    tasks/settings.py                        the other settings
    tasks/fleet/models.py                    each fact of a model
    tasks/fleet/reports.py                   each figure of a worker
    gpu_worker/models/weights/formats/gguf.py    each type of GGUF files
    tests/support/clients/record.json    what came of the clients' steps (`make clients`)

    petiole/contract/types.py           the same for type checkers and editors: all of it is written here
    tasks/submission/typed.py         the methods of the tasks, with these types: all of it is written here
    petiole/__init__.py, tasks/__init__.py   the names of the tasks among those that they offer
    docs/requests.md and others       the same for readers: the tables between `<!-- name -->` and `<!-- /name -->`
    README.md and others              where the project can be had (docs/address.py)

The text below a field is what an editor shows and what stands in the table. In the table `docs/page.md#heading`
becomes a link.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs import address
from docs.families import PUBLISHED
from petiole.contract.requests import count, embedding_tasks, generation, image_tasks, sampling, submission
from petiole.contract.requests.count import CountRequest
from petiole.contract.requests.generation import Common, Options
from petiole.contract.requests.validation import Given
from petiole.contract.results import task_result
from petiole.contract.settings.engine import SWITCHES
from petiole.contract.tasks import TASKS
from petiole.tasks.commands.cli import settings_page
from petiole.tasks.fleet import models, reports
from petiole.tasks.settings import PREFIX
from petiole.tasks.wire.record.codec import AT_THE_END
from tests.support.clients import RECORD, STEPS

ROOT = Path(__file__).resolve().parents[1]
TYPES = ROOT / "petiole" / "contract" / "types.py"
TYPED = ROOT / "tasks" / "submission" / "typed.py"
OFFERING = {
    ROOT / "petiole" / "__init__.py": "petiole.tasks",
    ROOT / "tasks" / "__init__.py": "petiole.tasks.submission.definitions",
}
"""Packages that offer the tasks, and the room from which type checkers have them there."""
_NAMES = (
    "requests.md",
    "streams.md",
    "vision.md",
    "models.md",
    "embeddings.md",
    "settings.md",
    "monitoring.md",
    "gateway.md",
)
PAGES = [ROOT / "docs" / name for name in _NAMES]
WIDTH = 115

HEAD = '''"""Options and results as type checkers and editors see them: `requests` and `results` as dictionaries.

A checker cannot derive a call's keyword arguments from a pydantic model. `python -m docs.render` writes this
module: change the declarations.
"""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel

from petiole.contract.requests.submission import Reading, Submission
from petiole.contract.results.task_result import FinishReason
'''

TASKS_HEAD = '''"""The tasks: what each takes, for type checkers.

A generic class could have these signatures as ParamSpecs, and type checkers would find the same mistakes. But
editors show an option's meaning from the field of a TypedDict, and behind a ParamSpec they find none. `python -m
docs.render` writes this module: change the template there.
"""
# These methods take fewer options than the base's:
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from celery.canvas import Signature

from petiole.contract import types
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.streams import readers
from petiole.tasks.streams.readers import AsyncGeneration
from petiole.tasks.submission.embed_many import EmbeddingTask
from petiole.tasks.submission.task import GenerationTask
'''

Model = type[BaseModel]


def main() -> None:
    TYPES.write_text(types())
    TYPED.write_text(typed_tasks())
    for path, room in OFFERING.items():
        path.write_text(offering(path.read_text(), room))
    for path in PAGES:
        path.write_text(page(path.read_text(), path.name))
        print(f"wrote the tables of {path.relative_to(ROOT)}")
    for path in address.PAGES:
        path.write_text(address.page(path.read_text()))
    address.CITATION.write_text(address.citation(address.CITATION.read_text()))
    print(f"wrote {TYPES.relative_to(ROOT)} and {TYPED.relative_to(ROOT)}")


# ---------------------------------------------------------------- what is declared


def texts(module: ModuleType) -> dict[tuple[str, str], str]:
    """By class and field, the text below the field."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[node.name, name] = " ".join(said.split())  # type: ignore[attr-defined]
    return found


_DECLARING = (generation, image_tasks, embedding_tasks, task_result, submission, models, count)
TEXTS = reduce(or_, map(texts, _DECLARING))
TEXTS |= {("Sampling", name): text for (_, name), text in texts(sampling).items()}


def own(model: Model) -> dict[str, FieldInfo]:
    """The fields that the model itself declares."""
    return {name: field for name, field in model.model_fields.items() if name in model.__annotations__}


def lineage(model: Model) -> list[Model]:
    """The models that declare the fields of `model`, itself the last."""
    return [one for one in reversed(model.__mro__) if issubclass(one, BaseModel) and own(one)]


def text_of(model: Model, name: str) -> str:
    declared = (TEXTS.get((one.__name__, name)) for one in reversed(lineage(model)) if name in own(one))
    said = next(filter(None, declared), "")
    return said + span(get_type_hints(model, include_extras=True)[name])


def span(hint: Any) -> str:
    """From where to where a number may be, if it is limited on both sides."""
    numbers = [part for part in (hint, *get_args(hint)) if get_origin(part) is Annotated]
    limits = {type(extra): extra for part in numbers for extra in get_args(part)[1:]}
    match limits.get(Ge) or limits.get(Gt), limits.get(Le):
        case Ge(ge=low), Le(le=high):
            return f" From {low:,.15g} to {high:,.15g}."
        case Gt(gt=low), Le(le=high):
            return f" Above {low:,.15g} and at most {high:,.15g}."
    return ""


# ---------------------------------------------------------------- petiole/contract/types.py


def types() -> str:
    tasks = [task.request for task in TASKS.values()]
    shared = dict.fromkeys(model for task in tasks for model in lineage(task) if model is not task)
    parts = [HEAD]
    parts += [
        typed_dict(model.__name__, bases(model), model, optional(model), inspect.getdoc(model) or "", total=False)
        for model in shared
    ]
    for task in tasks:
        parts += options_of(task)
    says = "What `count.delay` takes. Exactly one of `texts`, `messages` and `token_ids` must be given."
    parts += [typed_dict("CountCall", ["Submission"], CountRequest, CountRequest.model_fields, says, total=False)]
    parts += [result_dict(model) for model in inner_models(task_result.GenerationResult)]
    return "\n\n".join(parts).rstrip() + "\n"


def bases(model: Model) -> list[str]:
    return [base.__name__ for base in model.__bases__ if issubclass(base, BaseModel) and own(base)]


def optional(model: Model) -> dict[str, FieldInfo]:
    """The fields that the model itself declares and no call needs to give."""
    return {name: field for name, field in own(model).items() if not field.is_required()}


def options_of(task: Model) -> Iterator[str]:
    """What a call takes, and what a link of a chain takes: there the task before may supply what is required."""
    name = task.__name__.removesuffix("Request")
    under = bases(task)
    if optional(task):
        yield typed_dict(f"_{name}Options", under, task, optional(task), "What none needs to give.", total=False)
        under = [f"_{name}Options"]
    required = {key: field for key, field in task.model_fields.items() if field.is_required()}
    says = f"Options of `{name.lower()}`."
    yield typed_dict(f"{name}Options", under, task, required, says)
    says = f"Options of `{name.lower()}` in a chain: the previous task may supply what is missing."
    yield typed_dict(f"Partial{name}Options", under, task, required, says, total=False)
    yield f'class {name}Call({name}Options, Submission):\n    """What `{name.lower()}.delay` takes."""\n'
    yield f'class {name}Stream({name}Call, Reading):\n    """What `{name.lower()}.stream` takes."""\n'


TASK = '''
class {name}Task({base}):
    """`{task}`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.{name}Call]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.{name}Call]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.{name}Options = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.Partial{name}Options]) -> Signature: ...
        def si(self, **options: Unpack[types.{name}Options]) -> Signature: ...
        def stream(self, **options: Unpack[types.{name}Stream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.{name}Stream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay
'''


def typed_tasks() -> str:
    names = [task.name.capitalize() for task in TASKS.values()]
    return "\n".join(
        [TASKS_HEAD, *(TASK.format(name=name, task=name.lower(), base=based(name)) for name in names)]
    )


def offering(text: str, room: str) -> str:
    """A package's text with all tasks among the names of this room."""
    opening, closing = f"    from {room} import (\n", "    )\n"
    before, _, rest = text.partition(opening)
    listed, _, after = rest.partition(closing)
    tasks = [f"        {task.name} as {task.name}," for task in TASKS.values()]
    lines = sorted(
        {*listed.splitlines(), *tasks}, key=lambda line: (line.islower(), not line.split()[0].isupper(), line)
    )
    return f"{before}{opening}" + "\n".join(lines) + f"\n{closing}{after}"


def based(name: str) -> str:
    return "EmbeddingTask" if name == "Embed" else "GenerationTask"


def typed_dict(
    name: str,
    under: Sequence[str],
    model: Model,
    fields: Mapping[str, FieldInfo],
    says: str,
    *,
    total: bool = True,
) -> str:
    heads = [*(under or ["TypedDict"]), *([] if total else ["total=False"])]
    hints = get_type_hints(model, include_extras=True)
    lines = [f"class {name}({', '.join(heads)}):", quoted(says), ""]
    for key, field in fields.items():
        default = field.get_default(call_default_factory=True)
        absent = field.is_required() or default in (None, "", (), [], {})
        default = "" if absent else f" Default: {shown(default)}."
        lines += [f"    {key}: {spelled(given(hints[key]))}", quoted(text_of(model, key) + default)]
    return "\n".join(lines).rstrip() + "\n"


def given(hint: Any) -> Any:
    """A field's type as callers may write it."""
    if get_origin(hint) in (UnionType, Union):
        return reduce(or_, map(given, get_args(hint)))
    for extra in get_args(hint) if get_origin(hint) is Annotated else ():
        if isinstance(extra, Given):
            return extra.hint | get_args(hint)[0]
    return hint


def inner_models(model: Model) -> list[Model]:
    """The models in a result, inner ones first."""
    hints = get_type_hints(model).values()
    inner = [one for hint in hints for one in flat(hint) if is_record(one)]
    return list(dict.fromkeys([*itertools.chain.from_iterable(map(inner_models, inner)), model]))


def flat(hint: Any) -> Iterator[Any]:
    """A type, and the types in it."""
    yield hint
    for part in get_args(hint):
        yield from flat(part)


def result_dict(model: Model) -> str:
    """A field that is None by default is absent in the dictionary."""
    lines = [f"class {dictionary(model)}(TypedDict):"]
    says = "What a task returns." if model is task_result.GenerationResult else inspect.getdoc(model)
    lines += [quoted(says or ""), ""]
    defaults = defaults_of(model)
    for key, hint in get_type_hints(model).items():
        if key not in defaults:
            continue
        absent = defaults[key] is None
        kind = spelled(hint).removesuffix(" | None") if absent else spelled(hint)
        lines += [f"    {key}: NotRequired[{kind}]" if absent else f"    {key}: {kind}"]
        lines += [quoted(text)] if (text := text_of(model, key)) else []
    return "\n".join(lines).rstrip() + "\n"


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, task_result.ResultModel) or dataclasses.is_dataclass(hint))


def defaults_of(model: Any) -> dict[str, Any]:
    """By field: its default, or something that is no default."""
    if dataclasses.is_dataclass(model):
        return {one.name: one.default for one in dataclasses.fields(model)}
    declared: dict[str, FieldInfo] = model.model_fields
    return {name: ... if field.is_required() else field.default for name, field in declared.items()}


def dictionary(model: Model) -> str:
    return model.__name__.removesuffix("Result") + "Dict"


def spelled(hint: Any) -> str:
    """A type as it is written in `types`, without limits."""
    if hint == task_result.FinishReason:
        return "FinishReason"
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(repr(one).replace(chr(39), chr(34)) for one in get_args(hint))}]"
    if get_origin(hint) is Annotated:
        return spelled(get_args(hint)[0])
    if get_origin(hint) in (UnionType, Union):
        return " | ".join(map(spelled, get_args(hint)))
    if arguments := get_args(hint):
        kind = {Sequence: list, Mapping: dict}.get(get_origin(hint), get_origin(hint))
        return f"{kind.__name__}[{', '.join(map(spelled, arguments))}]"
    if hint is NoneType:
        return "None"
    if is_record(hint):
        return dictionary(hint)
    return str(hint.__name__)


def quoted(text: str) -> str:
    filled = textwrap.fill(f'"""{text}"""', WIDTH - 4, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent(filled, " " * 4)


# ---------------------------------------------------------------- docs/requests.md


def page(text: str, page_name: str) -> str:
    """A page of docs/ with its tables made anew; the prose is by hand."""
    for name, table in tables(page_name).items():
        if f"<!-- {name} -->" not in text:
            continue
        opening, closing = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(opening)
        _, end, after = rest.partition(closing)
        assert end, f"{page_name}: no <!-- /{name} --> on a line below <!-- {name} -->"
        text = before + opening + table + closing + after
    return text


def tables(page_name: str) -> dict[str, str]:
    linked = partial(linked_from, page_name)
    known = {task.name: task.request for task in TASKS.values()}
    tasks = {name: model for name, model in known.items() if issubclass(model, Options)}
    shared = set.intersection(*(set(lineage(model)) for model in tasks.values()))
    inputs = [
        (f"`{task}`", f"`{name}`", linked(text_of(model, name)))
        for task, model in tasks.items()
        for name in model.model_fields
        if not any(name in own(one) for one in shared)
    ]
    one = next(iter(tasks.values()))
    options = [
        (f"`{name}`", f"`{shown(field.get_default(call_default_factory=True))}`", linked(text_of(one, name)))
        for model in lineage(one)
        if model in shared
        for name, field in own(model).items()
    ]

    def asked(*, sees: bool) -> list[tuple[str, ...]]:
        """The options of the tasks for models that see pictures, or of those for models of texts: an option that
        means the same to several tasks, once."""
        takers: dict[tuple[str, ...], list[str]] = {}
        for task, model in known.items():
            if task not in tasks and issubclass(model, image_tasks.Answering | image_tasks.Finding) == sees:
                for name, field in model.model_fields.items():
                    if name not in Common.model_fields:
                        row = (f"`{name}`", default_of(field), linked(text_of(model, name)))
                        takers.setdefault(row, []).append(f"`{task}`")
        return [(", ".join(names), *row) for row, names in takers.items()]

    submitted = [
        (f"`{name}`", linked(TEXTS["Submission", name])) for name in submission.Submission.__annotations__
    ]

    of_result = {text_of(task_result.GenerationResult, name) for name in task_result.GenerationResult.model_fields}

    def fields(model: Model, hidden: Model, when: str = "") -> str:
        rows = []
        for name in [name for name in model.model_fields if name not in hidden.model_fields]:
            said = text_of(model, name)
            if when and name in AT_THE_END:
                again = said in of_result
                said = when + ("as in docs/requests.md#the-result." if again else said[0].lower() + said[1:])
            rows.append((f"`{name}`", linked(said)))
        return markdown(("field", ""), rows)

    switches = [
        (f"`{PREFIX}{name.upper()}`", ", ".join(f"`{value}`" for value in one.values), one.meaning)
        for name, one in SWITCHES.items()
    ]
    return {
        "settings": settings_page(),
        "switches": markdown(("variable", "values, the default first", ""), switches),
        "inputs": markdown(("task", "option", ""), inputs),
        "options": markdown(("option", "default", ""), options),
        "skills": markdown(("task", "option", "default", ""), asked(sees=True)),
        "texts": markdown(("task", "option", "default", ""), asked(sees=False)),
        "submission": markdown(("option", ""), submitted),
        "result": fields(task_result.GenerationResult, task_result.Shown),
        "metrics": markdown(("by `worker` and `model`", ""), metrics()),
        "families": markdown(("models", "`architectures`"), families()),
        **({"gguf": gguf_files()} if page_name == "models.md" else {}),
        **({"clients": clients()} if page_name == "gateway.md" else {}),
        "facts": fields(models.ModelFacts, BaseModel),
        "delta": fields(task_result.StreamDelta, task_result.ShownPiece, "At the end: "),
    }


def metrics() -> Iterator[tuple[str, str]]:
    """The metrics that are a figure of a worker's report each, and the histograms."""
    for field in reports.WorkerReport.model_fields.values():
        for one in field.metadata:
            if isinstance(one, reports.Exported):
                by = f" (by `{one.by}`)" if one.by else ""
                yield f"`petiole_{one.name}{'_total' if one.kind == 'counter' else ''}`{by}", one.what
    for histogram in reports.HISTOGRAMS.values():
        yield f"`petiole_{histogram.name}`", f"Histogram. {histogram.what}"


def families() -> Iterator[tuple[str, ...]]:
    """What can be served. `tests.gpu_worker.models.test_published` holds it to the code."""
    for one in PUBLISHED:
        exceptions = (one.cpu == "torch", "in torch on a CPU"), (not one.cuda, "not on CUDA")
        said = [one.models, *(what for holds, what in exceptions if holds)]
        yield "; ".join(said), ", ".join(f"`{name}`" for name in one.architectures)


def gguf_files() -> str:
    """GGUF files: architectures, and what becomes of each type, the smallest first."""
    from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
    from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import ARCHITECTURES
    from petiole.gpu_worker.models.weights.formats.gguf import FORMATS, layout
    from petiole.gpu_worker.runtime.cpu.native.products.weights import unknown_form

    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in FORMATS:
        form, stored = layout(kind, 32, 1024), TYPES[kind].n_bytes * 8 / TYPES[kind].values
        scales = (
            f"steps, a factor for {form.steps} of them" if form.steps else str(form.scales).removeprefix("torch.")
        )
        offsets = ", offsets" if form.offsets else ""
        bits = form.n_bytes * 8 / form.outputs / form.inputs
        torch = "" if unknown_form(form) is None else "; in torch on a CPU"
        row = f"{form.bits} bits", f"{form.group}", f"{scales}{offsets}{torch}", f"{bits:.3g}"
        rows.setdefault(row, []).append(f"`{kind}` ({stored:.3g})")
    head = ("types (bits a weight)", "codes", "group", "scales", "bits in memory")
    ordered = sorted(rows.items(), key=lambda one: float(one[0][3]))
    named = f"Architectures: {', '.join(f'`{name}`' for name in ARCHITECTURES)}.\n\n"
    return named + markdown(head, [(", ".join(kinds), *row) for row, kinds in ordered])


def clients() -> str:
    """Clients by their steps: done, or why a client has no such step. What is the same for several is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in json.loads(RECORD.read_text()).values():
        steps = tuple(row["steps"][step] or "✓" for step in STEPS)
        at = {"npm": "@", "PyPI": "=="}[row["registry"]]
        rows.setdefault(steps, []).append(f"{row['client']}{at}{row['version']}")
    head = [["client", *STEPS.values()], ["---"] * (len(STEPS) + 1)]
    lines = [*head, *([", ".join(names), *steps] for steps, names in rows.items())]
    return "\n".join("|" + "|".join(line) + "|" for line in lines)


def default_of(field: FieldInfo) -> str:
    return "" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"


def shown(default: object) -> str:
    if default == ():
        return "[]"
    return '""' if default == "" else repr(default)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [*(f"| {' | '.join(row)} |" for row in (head, *rows))]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]).replace("|  |", "| |")


def linked_from(page_name: str, text: str) -> str:
    return re.sub(r"docs/(\w+\.md)(?:#([\w-]+))?", lambda match: link(page_name, match[1], match[2]), text)


def link(page_name: str, name: str, anchor: str | None) -> str:
    if anchor is None:
        return f"[{name.removesuffix('.md')}]({name})"
    headings = re.findall(r"^#+ +(.*?) *$", (ROOT / "docs" / name).read_text(), re.M)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in headings}
    target = f"#{anchor}" if name == page_name else f"{name}#{anchor}"
    return f"[{named[anchor]}]({target})"


if __name__ == "__main__":
    main()
