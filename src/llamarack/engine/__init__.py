"""One adaptor per engine: how it is started, how it is read, why it died.

- `adaptor`: the contract and its records
- `llamacpp`, `llamacpp_worker`: llama.cpp in a process of its own
"""

from llamarack.engine.adaptor import Adaptor
from llamarack.engine.llamacpp import LlamaCpp

ADAPTORS: dict[str, Adaptor] = {"llamacpp": LlamaCpp()}
