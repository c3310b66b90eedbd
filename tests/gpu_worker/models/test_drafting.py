"""The head of Qwen3.5 that drafts: what it computes, and that the tokens are those of plain decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.harness.driver import Driver
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.runtime.cpu.head import KEPT, Head, StepHead
from petiole.gpu_worker.runtime.sizing import Sizes, sizes_of
from tests.gpu_worker.models.test_states_and_drafts import PROMPTS, SAMPLINGS, answers
from tests.support.seeing import PAD, as_file, drawn_picture, write_seeing
from tests.support.text_models import write_modules, write_tokenizer

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
HEADS = {"qwen3.5": "Qwen3_5", "qwen3.5-moe": "Qwen3_5Moe"}


class Reference:
    """A model of transformers with a head: one of its own layers that attend, with random weights."""

    def __init__(self, model: Any, family: str) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

        of = dense.Qwen3_5DecoderLayer if family == "qwen3.5" else moe.Qwen3_5MoeDecoderLayer
        self.model, config = model, model.config.get_text_config()
        attends = config.layer_types.index("full_attention")
        torch.manual_seed(5)
        self.layer = of(config, attends).eval()
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.08)
        hidden = config.hidden_size
        self.tensors = {
            "fc.weight": torch.randn(hidden, 2 * hidden) / hidden**0.5,
            **{
                f"{name}.weight": torch.randn(hidden) / 9
                for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
            },
            "norm.weight": torch.randn(hidden) / 9,
            **{f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()},
        }

    def write(self, source: Path, folder: Path) -> None:
        stored = load_file(source / "model.safetensors")
        more = {f"mtp.{name}": tensor.contiguous() for name, tensor in self.tensors.items()}
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        save_file({**stored, **more}, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * (1 + self.tensors[f"{name}.weight"])

    def joined(self, tokens: Tensor, known: Tensor) -> Tensor:
        embedded = self.norm("pre_fc_norm_embedding", self.model.model.embed_tokens(tokens))
        return torch.cat([embedded, self.norm("pre_fc_norm_hidden", known)], dim=-1) @ self.tensors["fc.weight"].T

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The likeliest tokens behind these. The chain goes on with its own output as a further input."""
        tokens = torch.tensor([ids])
        x, found = self.joined(tokens[:, 1:], self.model.model(tokens).last_hidden_state[:, :-1]), list[int]()
        while len(found) < count:
            n = x.shape[1]
            positions = torch.arange(n)[None]
            turned = self.model.model.rotary_emb(x, positions)
            hidden = torch.full((n, n), float("-inf")).triu(1)[None, None]
            made = self.layer(x, position_embeddings=turned, attention_mask=hidden, position_ids=positions)
            made = self.norm("norm", made[0] if isinstance(made, tuple) else made)
            found.append(int(self.model.lm_head(made)[0, -1].argmax()))
            x = torch.cat([x, self.joined(torch.tensor([found[-1:]]), made[:, -1:])], dim=1)
        return found


@pytest.fixture(scope="module")
def headed(
    checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Reference]]:
    made: dict[str, tuple[Path, Reference]] = {}

    def get(family: str) -> tuple[Path, Reference]:
        if family not in made:
            source, model = checkpoint(family)
            reference, folder = Reference(model, family), tmp_path_factory.mktemp("headed")
            reference.write(source, folder)
            made[family] = folder, reference
        return made[family]

    return get


@pytest.mark.parametrize("family", HEADS)
def test_the_head_drafts_what_transformers_compute(family: str, headed: Any, open_runtime: Any) -> None:
    """In chunks of a prompt, in decodes and behind verifications that were rejected in part: a chain of three."""
    folder, reference = headed(family)
    driver = Driver(open_runtime(folder, speculative_tokens=3))
    sequence, other = driver.sequence([5, 17, 200, 33, 91, 7, 8]), driver.sequence([9, 3])

    def compare(output: Any) -> None:
        for row, one in enumerate((sequence, other)):
            ids = [*one.prompt, *one.output]
            assert output.drafts[row].tolist() == reference.drafts(ids, 3), ids

    driver.prefill([sequence], [4])
    compare(driver.prefill([sequence, other]))
    for _ in range(3):
        compare(driver.decode([sequence, other]))
    driver.ahead = 0
    driver.decode([sequence, other])
    driver.ahead = 3
    compare(driver.decode([sequence, other]))
    known = torch.tensor([[*sequence.prompt, *sequence.output]])
    right = int(reference.model(known).logits[0, -1].argmax())
    output = driver.verify([sequence, other], [[right], [0]])
    assert output.accepted.tolist() == [2, 1]
    compare(output)
    compare(driver.verify([sequence, other], [[1], []]))
    compare(driver.decode([sequence, other]))


def test_a_head_that_misses_steps_drafts_something_else(
    headed: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose: steps behind which nothing is drafted leave no keys and values of the head."""
    folder, reference = headed("qwen3.5")
    first, drafted = StepHead.first, list[list[int]]()
    for missing in (False, True):
        driver = Driver(open_runtime(folder, speculative_tokens=3))
        sequence, driver.ahead = driver.sequence([5, 17, 200, 33, 91, 7, 8]), 0
        if missing:
            monkeypatch.setattr(
                StepHead,
                "first",
                lambda self, following, at: first(self, following, at) if len(at) else torch.empty(0),
            )
        driver.prefill([sequence])
        driver.decode([sequence])
        driver.ahead = 3
        drafted.append(driver.decode([sequence]).drafts[0].tolist())
    right = reference.drafts([*sequence.prompt, *sequence.output], 3)
    assert drafted[0] == right != drafted[1]


@pytest.mark.parametrize("steps", [1, 2, 7, KEPT])
def test_the_head_runs_once_for_what_several_decodes_leave_and_drafts_the_same(
    steps: int, headed: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = headed("qwen3.5")
    runs, run = list[int](), Head.run

    def counted(self: Head, at: Any) -> Any:
        runs.append(len(self._kept))
        return run(self, at)

    monkeypatch.setattr(Head, "run", counted)
    driver = Driver(open_runtime(folder, speculative_tokens=3))
    pair, third = [driver.sequence([5, 17, 200, 33, 91]), driver.sequence([9, 3])], driver.sequence([4, 2, 8])

    def right(output: Any, sequences: Any) -> bool:
        return all(
            drafts == reference.drafts([*one.prompt, *one.output], 3)
            for drafts, one in zip(output.drafts.tolist(), sequences, strict=True)
        )

    driver.ahead = 0
    driver.prefill(pair)
    for _ in range(steps):
        driver.decode(pair)
    assert runs == [1, *[KEPT // 2] * (2 * steps // KEPT)]
    driver.ahead = 3
    assert right(driver.decode(pair), pair)
    assert runs[-1] == 1 + steps % (KEPT // 2)
    driver.ahead = 0
    driver.decode(pair)
    driver.decode(pair)
    driver.finish(pair.pop())  # its pages are given to others
    driver.prefill([third])
    assert runs[-2:] == [2, 1], "no step of the same rows"
    driver.ahead = 3
    rest = [*pair, third]
    assert right(driver.decode(rest), rest)


def test_drafts_of_the_head_give_the_tokens_of_plain_decoding(
    headed: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petiole.gpu_worker.speculation.head.worthwhile", lambda *_: 4)
    folder, _ = headed("qwen3.5")
    plain = open_runtime(folder, prefix_cache="off")
    with Engine(plain.config, runtime=plain) as engine:
        expected = {name: answers(engine, sampling) for name, sampling in SAMPLINGS.items()}
    assert plain.limits.drafts == 0
    runtime = open_runtime(folder, speculative_tokens=2, chunk_size=16, num_pages=140, debug=True)
    assert runtime.limits.drafts == 2
    with Engine(runtime.config, runtime=runtime) as engine:
        for _ in range(2):  # from the prefix cache, too
            for name, sampling in SAMPLINGS.items():
                assert answers(engine, sampling) == expected[name], name
        assert engine.stats()["draft_tokens"] > 0
        short = SamplingParams(temperature=0.0, max_tokens=2)
        assert len(engine.generate([Request(prompt=PROMPTS[0], sampling=short)])[0].token_ids) == 2


def test_a_model_with_a_head_sees(tmp_path: Path, open_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with pictures are not drafted for."""
    monkeypatch.setattr("petiole.gpu_worker.speculation.head.worthwhile", lambda *_: 4)
    source, folder = tmp_path / "plain", tmp_path / "headed"
    folder.mkdir()
    Reference(write_seeing(source, "qwen3.5"), "qwen3.5").write(source, folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    seeing = Request(prompt=[7, PAD, 8, 9], images=[as_file(drawn_picture(64, 96))], sampling=greedy)
    texts = [Request(prompt=prompt, sampling=greedy) for prompt in PROMPTS]
    made, drafted = [], []
    for drafts in (0, 3):
        runtime = open_runtime(folder, speculative_tokens=drafts, debug=True)
        with Engine(runtime.config, runtime=runtime) as engine:
            alone = engine.generate([seeing])
            drafted.append(engine.stats()["draft_tokens"])
            made.append([result.token_ids for result in (*alone, *engine.generate([*texts, seeing]))])
            drafted.append(engine.stats()["draft_tokens"] > 0)
    assert made[1] == made[0]
    assert drafted == [0, False, 0, True]


def test_a_model_of_texts_drafts_nothing(headed: Any, tmp_path: Path, cpu_path: str) -> None:
    source, _ = headed("qwen3.5")
    folder = tmp_path / "texts"
    shutil.copytree(source, folder)
    write_tokenizer(folder, "$A </s>", "$A $B </s>")
    write_modules(folder, "lasttoken")
    vectors = []
    for drafts in (0, 1):
        config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, speculative_tokens=drafts)
        with Engine(config) as engine:
            assert engine.runtime.limits.drafts == 0
            vectors.append(engine.generate([Request(texts=["one", "two"], embedding=Embedding())])[0].vectors)
    assert vectors[1] == vectors[0] is not None


def test_a_head_that_is_not_there_is_refused_by_name(checkpoint: Any, open_runtime: Any) -> None:
    folder, _ = checkpoint("qwen3.5")
    with pytest.raises(InvalidRequest, match=r"drafts.*no head that drafts.*got mtp"):
        open_runtime(folder, speculative_tokens=2, drafts="mtp")
    assert open_runtime(folder, speculative_tokens=2).limits.drafts == 0


def test_settings_say_what_they_do_not_do(
    headed: Any, open_runtime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = headed("qwen3.5")
    caplog.set_level("INFO")
    runtime = open_runtime(folder, speculative_tokens=6)
    assert "speculative_tokens=6: the model's head drafts 4 tokens a step" in caplog.messages
    assert runtime.config.speculative_tokens == 4
    with Engine(EngineConfig(model=str(folder), speculative_tokens=6), runtime=runtime) as engine:
        assert engine.config.speculative_tokens == 4
    caplog.clear()
    open_runtime(folder, speculative_tokens=1)
    assert not [message for message in caplog.messages if "speculative_tokens" in message]
    open_runtime(folder, drafts="mtp")
    assert "drafts=mtp changes nothing without speculative_tokens" in caplog.messages


def test_what_a_head_takes_is_foreseen(headed: Any, checkpoint: Any, tmp_path: Path) -> None:
    """From its weights, and from a configuration alone."""
    folder, _ = headed("qwen3.5")
    shutil.copy(folder / "config.json", tmp_path)

    def sizes(model: Path, **settings: Any) -> Sizes:
        return sizes_of(EngineConfig(model=str(model), device="cpu", dtype="float32", **settings), 2**30)

    plain, drafting, alone = sizes(folder), *(sizes(one, speculative_tokens=1) for one in (folder, tmp_path))
    assert alone.weight_bytes == drafting.weight_bytes > plain.weight_bytes
    assert alone.kv_bytes_per_token == drafting.kv_bytes_per_token > plain.kv_bytes_per_token
    without, _ = checkpoint("qwen3.5")
    with pytest.raises(InvalidRequest, match=r"drafts.*no head that drafts.*got mtp"):
        sizes(without, speculative_tokens=1, drafts="mtp")
