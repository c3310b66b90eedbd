"""Which GGUF file a name means, in a folder and on a hub, and of which pieces it consists."""

from __future__ import annotations

from pathlib import Path

import pytest

from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.checkpoint.gguf.choosing import choose, pieces_of
from tests.support.slow_hub import Hub

TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
NAMES = {
    "model-Q4_K_M.gguf": 1_100_000_000,
    "model-Q8_0.gguf": 600_000,
    "model-UD-Q2_K.gguf": 5,
    "mmproj-model-F16.gguf": 7,
    "F16/model-F16-00001-of-00002.gguf": 3,
    "F16/model-F16-00002-of-00002.gguf": 4,
    "imatrix.gguf": 1,
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("q8_0", ["model-Q8_0.gguf"]),
        ("model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        ("Q2_K", ["model-UD-Q2_K.gguf"]),
        ("F16", ["F16/model-F16-00001-of-00002.gguf", "F16/model-F16-00002-of-00002.gguf"]),
    ],
)
def test_the_end_of_a_name_tells_the_model(wanted: str, found: list[str]) -> None:
    assert choose("here", NAMES, wanted) == found


def test_several_are_listed_with_their_sizes() -> None:
    with pytest.raises(ModelError) as raised:
        choose("here", NAMES)
    assert str(raised.value) == (
        "here has 4 models: PETIOLE_MODEL must name one with a colon, as PLACE:Q8_0, of F16/model-F16 (0 MB), "
        "model-Q4_K_M (1.10 GB), model-Q8_0 (1 MB), model-UD-Q2_K (0 MB)"
    )
    with pytest.raises(
        ModelError, match=r"here has 0 models whose names end in Q4_0: .* model-Q4_K_M \(1.10 GB\)"
    ):
        choose("here", NAMES, "Q4_0")
    with pytest.raises(ModelError, match="here has 2 models whose names end in Q8_0"):
        choose("here", {"a-Q8_0.gguf": 1, "b-Q8_0.gguf": 1}, "Q8_0")
    with pytest.raises(ModelError, match="here has no GGUF file"):
        choose("here", {"model.safetensors": 1, "mmproj-F16.gguf": 2}, "Q8_0")
    assert choose("here", {"model.safetensors": 1}) == []


def test_pieces(tmp_path: Path) -> None:
    one, two = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    two.write_bytes(b"")
    with pytest.raises(ModelError, match=r"is one of 2 pieces: .*m-00001-of-00002.gguf is missing"):
        pieces_of(two)
    one.write_bytes(b"")
    with pytest.raises(ModelError, match=r"00003-of-00002.gguf must be one of 2 pieces, got number 3"):
        pieces_of(tmp_path / "m-00003-of-00002.gguf")
    assert pieces_of(two) == [one, two]
    assert resolve_model(str(two)) == one
    assert resolve_model(str(tmp_path)) == one


def test_a_folder_and_a_name(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_model(f"{tmp_path}:Q8_0") == tmp_path / "m-Q8_0.gguf"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(f"{tmp_path}:Q4_0") == tmp_path / "m-Q4_0.gguf"
    with pytest.raises(ModelError, match=r"names end in Q5_0: .* m-Q4_0 \(0 MB\), m-Q8_0 \(0 MB\)"):
        resolve_model(f"{tmp_path}:Q5_0")
    with pytest.raises(ModelError, match=r"model folder /nowhere does not exist"):
        resolve_model("/nowhere:Q5_0")
    with pytest.raises(ModelError, match=r"model file /nowhere\.gguf does not exist"):
        resolve_model("/nowhere.gguf")
    with pytest.raises(ModelError, match=r"m-Q4_0\.gguf is a file: nothing may stand after a colon, got Q4_0"):
        resolve_model(f"{tmp_path}/m-Q4_0.gguf:Q4_0")
    (tmp_path / "m-Q8_0.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"m-Q8_0\.gguf is a Git-LFS pointer, not the file itself"):
        resolve_model(f"{tmp_path}:Q8_0")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Of these files, each with its name inside."""
    names = ("config.json", "README.md", *NAMES)
    made = Hub({name: name.encode() for name in names})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", made.url + TEMPLATE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return made


def test_the_hub_sends_one_model_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub:
        found = resolve_model("somebody/model:F16")
        assert found.read_bytes() == b"F16/model-F16-00001-of-00002.gguf"
        assert sorted(hub.sent) == [name for name in sorted(NAMES) if name.startswith("F16/")]
        with pytest.raises(ModelError, match=r"model somebody/model has 4 models: .*model-Q4_K_M \(0 MB\)"):
            resolve_model("somebody/model")
        with pytest.raises(ModelError, match=r"model somebody/model has 0 models whose names end in Q5_0"):
            resolve_model("somebody/model:Q5_0")
        assert not [name for name in hub.sent if name.endswith(("Q4_K_M.gguf", "README.md"))]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("somebody/model:F16") == found
    assert resolve_model("somebody/model:F16", download=False) == found
    with pytest.raises(MachineError, match="the hub does not provide it"):
        resolve_model("somebody/other:F16")
