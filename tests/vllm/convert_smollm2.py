"""`python convert_smollm2.py SOURCE.gguf FOLDER`: the GGUF's weights as Hugging Face files. Runs beside torch."""

import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    torch, library = import_module("torch"), import_module("transformers")  # not in the environment that checks types
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = library.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = library.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=library.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
