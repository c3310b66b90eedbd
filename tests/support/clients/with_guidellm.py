# /// script
# dependencies = ["guidellm", "jinja2", "transformers"]
#
# [tool.uv]
# override-dependencies = ["torch; sys_platform == 'never'", "torchvision; sys_platform == 'never'"]
# ///
"""guidellm: `guidellm run`, a benchmark of a server."""

import json
import os
from pathlib import Path

import steps

OWN = Path("own").resolve()
AROUND = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(OWN)}
OWN.mkdir()
for name in ("torch", "torchgen"):  # too large to be fetched again: it is that of the tests
    (OWN / name).symlink_to(Path(os.environ["PETIOLE_SITE"]) / name)
Path("prompts.txt").write_text(f"{steps.SHORT}\n" * 8)


def _measured(model=steps.MODEL):
    """By their ends, the requests of a benchmark."""
    Path("out.json").unlink(missing_ok=True)
    printed = steps.command(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={steps.ROOT},model={model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=text_file,path=prompts.txt", "--output", "kind=json,path=out.json"),
        "--disable-progress",
        **AROUND,
    )
    assert Path("out.json").exists(), printed
    return json.loads(Path("out.json").read_text())["benchmarks"][0]["requests"]


chat = steps.lacks("streams")


def stream():
    made = _measured()["successful"]
    assert [one["output"] for one in made] == [steps.COUNTED] * 6, made


tools = steps.lacks("no tools")
structured = steps.lacks("no option")
abort = steps.lacks("no call")


def error():
    made = _measured("none")
    assert made["errored"], made
    assert not made["successful"], made


resume = steps.lacks("asks anew")
steps.run(globals())
