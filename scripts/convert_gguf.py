"""Convert a GGUF file, in which llama.cpp keeps a model, to a folder that model.path can name, weights in float32.

transformers reads the file, with the package ``gguf`` for the quantized weights.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import first_line
from agentrl.models.load import quiet


def main(argv: list[str]) -> int:
    """Convert the file, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="the new folder")
    arguments = parser.parse_args(argv)
    if not arguments.file.is_file():  # transformers would look for it on the hub
        parser.error(f"there is no file {str(arguments.file)!r}")
    try:
        convert(arguments.file, arguments.folder)
    except Exception as error:  # transformers raises all kinds of things on files that are none of its own
        print(f"the model in {str(arguments.file)!r} can't be converted: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file and its tokenizer to a folder."""
    quiet()
    options: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    # The weights are plain numbers by now, but transformers refuses to save a model that it loaded from such a file.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
