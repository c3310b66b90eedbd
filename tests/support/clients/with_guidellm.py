# /// script
# dependencies = ["guidellm"]
#
# [tool.uv]
# override-dependencies = ["torch; sys_platform == 'never'", "torchvision; sys_platform == 'never'"]
# ///
"""guidellm: `guidellm run`, a benchmark of a server."""

import json
from pathlib import Path

import steps

AROUND = {"HF_HUB_OFFLINE": "1"}
Path("prompts.txt").write_text(f"{steps.SHORT}\n" * 8)


def _measured(model=steps.MODEL):
    printed = steps.command(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={steps.ROOT},model={model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=text_file,path=prompts.txt", "--output", "kind=json,path=out.json"),
        "--disable-progress",
        **AROUND,
    )
    assert Path("out.json").exists(), printed
    return json.loads(Path("out.json").read_text()), printed


def chat():
    made, printed = _measured()
    assert made, printed


steps.run(globals())
