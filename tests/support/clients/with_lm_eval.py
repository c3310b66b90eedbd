# /// script
# dependencies = ["lm-eval[api]", "transformers"]
# ///
"""EleutherAI's lm-evaluation-harness, on a task of its own: `lm-eval run`."""

import json
from pathlib import Path

import steps

AROUND = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
TOKENIZER = Path(__file__).parents[3] / "gpu_worker" / "models" / "petiole_tiny" / "tools"
ROWS = [{"question": "Count from 1 to 5.", "answer": "1, 2, 3, 4, 5"}]
TASK = """\
task: counting
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
GENERATED = """\
output_type: generate_until
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""
LIKELY = """\
output_type: multiple_choice
doc_to_choice: ["5, 4, 3, 2, 1", "{{answer}}"]
metric_list: [{metric: acc}]
"""
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def _scored(kind, path, more, *options, model=steps.MODEL, tokens="tokenizer_backend=none"):
    """The metrics of the task."""
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks/counting.yaml").write_text(TASK.format(rows=Path("rows.jsonl").resolve()) + more)
    where = f"model={model},base_url={steps.URL}{path},max_retries=1,{tokens}"
    printed = steps.command(
        *("lm_eval", "run", "--model", kind, "--model_args", where, "--tasks", "counting"),
        *("--include_path", "tasks", "--output_path", "out", *options),
        **AROUND,
    )
    found = sorted(Path("out").rglob("results*.json"))
    assert found, printed
    results = json.loads(found[-1].read_text())["results"]["counting"]
    for path in found:
        path.unlink()
    return results


def chat():
    made = _scored("local-chat-completions", "/chat/completions", GENERATED, "--apply_chat_template")
    assert made["exact_match,none"] == 1, made


stream = steps.lacks("whole")
tools = steps.lacks("no tools")
structured = steps.lacks("no option")
abort = steps.lacks("whole")


def error():
    with steps.refused(AssertionError, by="must be a model"):
        _scored("local-chat-completions", "/chat/completions", GENERATED, "--apply_chat_template", model="none")


resume = steps.lacks("asks anew")


def likelihoods():
    """Log-probabilities of the prompt, by which choices are scored."""
    where = ("local-completions", "/completions")
    assert "acc,none" in _scored(*where, LIKELY, tokens=f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}")


steps.run(globals())
