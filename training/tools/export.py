"""Turn a checkpoint into the folder of `petiole-tiny-tools`: `python -m training.tools.export`.

The README in it is written by `training.tools.evaluate`.
"""

import argparse
from pathlib import Path

from training.export import MODEL_FOLDER as TINY, export
from training.tools.template import CHAT_TEMPLATE
from training.tools.train import DEFAULT_CHECKPOINT
from training.train import load_model

MODEL_FOLDER = TINY / "tools"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    args = parser.parse_args()
    export(load_model(args.checkpoint)[0], args.folder, CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
