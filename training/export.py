"""Turn a checkpoint into the model folder: `python -m training.export`.

The folder is in Hugging Face format with bfloat16 weights. The README in it is written by `training.evaluate`.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.model import Qwen3, Shape
from training.text import tokenizer
from training.text.dialogue import CHAT_TEMPLATE
from training.text.tokenizer import END_OF_TEXT_ID, IM_END_ID
from training.train import DEFAULT_CHECKPOINT, load_model

MODEL_FOLDER = Path(__file__).parent.parent / "gpu_worker" / "models" / "petiole_tiny"


def config_of(shape: Shape) -> dict[str, object]:
    """`config.json` for transformers' Qwen3ForCausalLM."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape.as_dict(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def export(model: Qwen3, folder: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write weights, configuration and tokenizer; the weights are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_of(model.shape), indent=2) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "max_new_tokens": 1024,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save(folder, chat_template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    args = parser.parse_args()
    model, _ = load_model(args.checkpoint)
    export(model, args.folder)
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
