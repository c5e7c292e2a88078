"""The process that holds one llama.cpp model: loads the library, lets its own C++ server listen, waits.

`python -P llamacpp_worker.py OPTIONS.json`; the key comes in the environment. Ends on SIGTERM at once: the supervisor
drains first. Imports nothing of llamarack and is imported by none of it.

With `--standby` in place of the file it loads the library and waits for a line on its standard input that holds the
command line (`argv`) and environment (`env`) that it shall have; without one it ends.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
from typing import Any, NoReturn

_ENUMS = {
    "cache_type_k": ("ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("ggml_type", "GGML_TYPE_"),
    "split_mode": ("llama_split_mode", "LLAMA_SPLIT_MODE_"),
    "pooling_type": ("llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    "flash_attn_type": ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
}


def _refuse(message: str) -> NoReturn:
    print(f"llamarack worker: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _apply(library: Any, parameters: Any, name: str, value: Any) -> None:
    owner = parameters
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, last):
        close = difflib.get_close_matches(name, dir(parameters), n=1)
        _refuse(f"engine_args.{name} is no option of this llama.cpp" + (f"; near: {close[0]}" if close else ""))
    if name in _ENUMS and isinstance(value, str):
        enum_name, prefix = _ENUMS[name]
        value = getattr(getattr(library, enum_name), prefix + value.upper())
    elif name == "model_alias":
        value = set(value)
    elif name == "tensor_split":
        value = [*value, *[0.0] * (len(parameters.tensor_split) - len(value))]
    try:
        setattr(owner, last, value)
    except (TypeError, ValueError) as error:
        _refuse(f"engine_args.{name}: {error}")


def _wait_to_be_told() -> None:
    told = sys.stdin.readline()
    if not told:
        raise SystemExit(0)
    value = json.loads(told)
    os.environ.update(value["env"])
    sys.argv = value["argv"][value["argv"].index("-P") + 1 :]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    print("worker: the library was loaded before it was asked for", flush=True)


def main() -> None:
    import xllamacpp

    if sys.argv[1:] == ["--standby"]:
        _wait_to_be_told()
    with open(sys.argv[1], encoding="utf-8") as file:
        options = json.load(file)
    parameters = xllamacpp.CommonParams()
    for name, value in options.items():
        _apply(xllamacpp, parameters, name, value)
    parameters.api_keys = [os.environ["LLAMARACK_ENGINE_KEY"]]
    print(f"worker: xllamacpp {xllamacpp.__version__}", flush=True)
    print(f"worker: {xllamacpp.get_system_info()}", flush=True)
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:
        print(f"failed to load model: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    print(f"worker: listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
